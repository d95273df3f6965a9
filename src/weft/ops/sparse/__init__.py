"""Sparse products, per-edge products and softmax over edges."""
