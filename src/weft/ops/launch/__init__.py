"""How a kernel is chosen and launched: backend, grid, Triton's language."""
