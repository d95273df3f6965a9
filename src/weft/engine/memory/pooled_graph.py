"""A graph whose arrays lie in a device's pool."""

from __future__ import annotations

from torch import Tensor

from weft.engine.memory.device_pool import DevicePool
from weft.graph.data.graph import Graph
from weft.graph.data.sparse_features import SparseFeatures
from weft.graph.data.splits import SPLITS
from weft.ops.csr.adjacency import Adjacency


def into_pool(graph: Graph, pool: DevicePool, owner: str) -> Graph | None:
    """A copy of ``graph`` in ``pool``; None if it does not fit. What is derived from it is made beside the pool."""
    copied = pool.copy_in(owner, arrays_of(graph))
    if copied is None:
        return None
    fields = {name: copied[name] for name in ("y", *SPLITS) if name in copied}
    x = copied.get("x")
    fields["x"] = SparseFeatures(_matrix(graph.x.matrix, "x.", copied)) if isinstance(graph.x, SparseFeatures) else x
    adj = _matrix(graph.adj, "adj.", copied)
    if graph.relation is not None:
        adj = adj.related(copied["relation"], graph.num_relations)
    made = graph._changed(adj=adj, relation=copied.get("relation"), **fields)
    made._stats = graph._stats
    return made


def arrays_of(graph: Graph) -> dict[str, Tensor]:
    """The arrays of a graph by name; nothing derived."""
    found = {name: getattr(graph, name) for name in ("y", "relation", *SPLITS)}
    found |= _arrays(graph.adj, "adj.")
    found |= _arrays(graph.x.matrix, "x.") if isinstance(graph.x, SparseFeatures) else {"x": graph.x}
    return {name: array for name, array in found.items() if array is not None}


def _arrays(matrix: Adjacency, prefix: str) -> dict[str, Tensor | None]:
    return {f"{prefix}{name}": getattr(matrix, name) for name in ("indptr", "indices", "weight")}


def _matrix(matrix: Adjacency, prefix: str, arrays: dict[str, Tensor]) -> Adjacency:
    parts = arrays[f"{prefix}indptr"], arrays[f"{prefix}indices"], matrix.num_cols
    return Adjacency(*parts, weight=arrays.get(f"{prefix}weight"), symmetric=matrix.symmetric)
