"""Run a plan on a device: the functional step, its state, its CUDA graph and its checkpoints."""
