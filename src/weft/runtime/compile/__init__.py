"""Compile users' steps with Inductor."""
