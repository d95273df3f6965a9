"""Aggregation over a shard of a graph: neighbours' rows that lie in the memory of peers or of the host."""
