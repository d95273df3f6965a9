"""Numba kernels of CPU sampling; imported on first use, since numba takes a while."""
