"""Suites of single operators on a GPU."""
