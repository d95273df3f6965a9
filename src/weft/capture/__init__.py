"""Capture: dry-run a training step on meta tensors and record it as a Program and as a graph of operators."""
