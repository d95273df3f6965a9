"""Batch and layer norm, fused with the activation and dropout that follow."""
