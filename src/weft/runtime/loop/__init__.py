"""The open parts of a training loop: users' losses, metrics and optimizers, clipping, averaging, plateau."""
