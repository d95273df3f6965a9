"""Suites that run on a CPU."""
