"""A plan as data and as text, with what to change when it does not fit."""
