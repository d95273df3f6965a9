"""Graphs: build, check, read, store and generate them."""

from typing import TYPE_CHECKING

from weft.core.startup import lazy_names

if TYPE_CHECKING:
    from weft.graph.graph import Graph as Graph
    from weft.graph.sparse_features import SparseFeatures as SparseFeatures

_MODULES = {
    "weft.graph.graph": ("Graph",),
    "weft.graph.sparse_features": ("SparseFeatures",),
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULES)
