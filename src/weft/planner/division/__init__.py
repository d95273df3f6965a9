"""Divide batch preparation between the host and what trains: partition, simulate, choose, adapt (MorphGL)."""
