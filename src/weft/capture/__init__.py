"""Capture: a training step, followed on tensors without data, as a Program and as a graph of operators."""
