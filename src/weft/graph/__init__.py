"""Graphs: build, check, read, store and generate them."""

from typing import TYPE_CHECKING

from weft.core.startup import lazy_names

if TYPE_CHECKING:
    from weft.graph.graph import Graph
    from weft.graph.sparse_features import SparseFeatures

__all__ = ["Graph", "SparseFeatures"]

_PLACES = {"Graph": "weft.graph.graph", "SparseFeatures": "weft.graph.sparse_features"}
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
