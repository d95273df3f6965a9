"""The commands of ``weft``: run, plan, probe, data, queue."""
