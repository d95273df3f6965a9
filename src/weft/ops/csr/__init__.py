"""The sparse matrix and the order in which kernels traverse it."""
