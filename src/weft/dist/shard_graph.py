"""ShardGraph: the part of a graph that one rank trains on: its nodes' edges, features, labels and splits.

Shapes: N nodes of the graph, n nodes of the rank, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.dist.partition_arrays import own_rows
from weft.dist.ranks import Ranks
from weft.dist.sharded_adjacency import ShardedAdjacency
from weft.graph.data.graph import Graph
from weft.graph.data.sparse_features import SparseFeatures
from weft.graph.data.splits import SPLITS
from weft.ops.csr.adjacency import Adjacency

Features = Tensor | SparseFeatures


class ShardGraph(Graph):
    """Rows ``bounds[rank]`` to ``bounds[rank + 1]`` of ``whole`` on the rank's device; ids of splits are local.

    It may have no nodes at all. ``stats()`` is the summary of the whole graph; ``first_row``: the global id of its
    first node; ``num_train``: training nodes of all ranks.
    """

    def __init__(self, whole: Graph, bounds: Sequence[int], ranks: Ranks) -> None:
        device, low, high = ranks.device, bounds[ranks.rank], bounds[ranks.rank + 1]
        adj = ShardedAdjacency.of(whole.adj, bounds, ranks.staging, ranks.gather_objects, device)
        splits = {name: _inside(getattr(whole, name), low, high).to(device) for name in SPLITS}
        x = None if whole.x is None else _rows(whole.x, low, high, device)
        y = None if whole.y is None else whole.y[low:high].to(device)
        super().__init__(adj, x, y, **splits, name=whole.name, num_classes=whole.num_classes, numbers=whole.regression)
        self._stats = whole.stats()
        self.first_row, self.num_train = low, whole.train.numel()

    def _check_shapes(self) -> None:
        """Nothing: the whole graph has been checked, and a shard may be empty."""

    def to(self, device: torch.device | str) -> ShardGraph:
        """Itself: it was made on the device of its rank."""
        self.adj.to(device)
        return self


def _inside(ids: Tensor, low: int, high: int) -> Tensor:
    """Those of the sorted ``ids`` in a range, counted from its beginning."""
    return ids[(ids >= low) & (ids < high)] - low


def _rows(x: Features, low: int, high: int, device: torch.device) -> Features:
    if isinstance(x, Tensor):
        return x[low:high].to(device)
    indptr, indices, weight, first = own_rows(x.matrix, low, high)
    assert weight is not None
    matrix = Adjacency(indptr.to(device), indices.to(device), x.matrix.num_cols, weight=weight.to(device))
    matrix.first_edge = first
    return SparseFeatures(matrix)
