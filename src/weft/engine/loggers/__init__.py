"""Loggers: write the Events of a run for other programs, one file per kind."""
