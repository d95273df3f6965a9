"""Graphs: build, check, read, store and generate them."""

from weft.graph.data.graph import Graph
from weft.graph.data.sparse_features import SparseFeatures

__all__ = ["Graph", "SparseFeatures"]
