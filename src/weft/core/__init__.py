"""Plain data on the standard library alone: the dataclasses that every other package uses."""
