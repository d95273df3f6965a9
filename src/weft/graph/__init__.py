"""Graphs: building, checking, reading, storing and generating them."""

from weft.graph.data.graph import Graph
from weft.graph.data.sparse_features import SparseFeatures

__all__ = ["Graph", "SparseFeatures"]
