"""Measure a machine that was never measured, in the background and only while it is idle."""
