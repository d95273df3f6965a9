"""Graphs: building, checking, reading, storing and generating them."""

from weft.graph.features import SparseFeatures
from weft.graph.graph import Graph

__all__ = ["Graph", "SparseFeatures"]
