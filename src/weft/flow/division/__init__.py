"""Batches prepared by two sides at once, host threads and what trains, and the profiler of their phases."""
