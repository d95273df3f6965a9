"""Divide batch preparation between the host and the trainer: partition, simulate, choose, adapt (MorphGL)."""
