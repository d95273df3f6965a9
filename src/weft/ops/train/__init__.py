"""Loss and optimizer kernels."""
