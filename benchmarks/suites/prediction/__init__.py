"""Estimates of memory and time against what runs take."""
