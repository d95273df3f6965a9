"""Batches prepared by two sides at once, host threads and the trainer, and the profiler of their phases."""
