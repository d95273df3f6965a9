"""Counter-based random bits, the same in torch, Triton and numba."""
