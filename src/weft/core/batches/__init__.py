"""Sizes of sampled batches as they are expected, from a summary of the graph."""
