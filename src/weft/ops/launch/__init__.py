"""Choose and launch kernels: backend, grid, Triton's language."""
