"""Small made graphs and comparisons shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from weft.graph import Graph, SparseFeatures

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def small_graph(sparse: bool = False, dtype: torch.dtype = torch.float32, **changes) -> Graph:
    """6 nodes (one isolated, one with a loop), 7 directed weighted edges of 2 relations, all fields set."""
    x = torch.tensor([[1, 0, 2], [0, 0, 0], [0, 3, 0], [4, 0, 0], [0, 0, 5], [0.5, 0, 0]], dtype=dtype)
    fields = {
        "src": [3, 0, 1, 2, 4, 4, 0],
        "dst": [0, 1, 2, 0, 4, 3, 4],
        "num_nodes": 6,
        "x": SparseFeatures.from_torch(x) if sparse else x,
        "y": [0, 1, 2, 1, -1, 0],
        "train": [0, 2],
        "val": [1],
        "test": [3, 5],
        "edge_weight": [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
        "relation": [0, 1, 0, 1, 0, 1, 0],
        "name": "small",
    }
    return Graph.from_edges(**(fields | changes))


def dense_adjacency(graph: Graph) -> np.ndarray:
    """``[N, N]`` with the summed weights of the edges j -> i at [i, j]."""
    dense = np.zeros((graph.num_nodes, graph.num_nodes))
    src, dst = graph.edge_index().numpy()
    weight = np.ones(len(src)) if graph.edge_weight is None else graph.edge_weight.numpy()
    np.add.at(dense, (dst, src), weight)
    return dense


def assert_same(left: Graph, right: Graph) -> None:
    """Every array, flag and name equal, types included."""
    assert left.name == right.name
    assert left.adj.symmetric == right.adj.symmetric
    pairs = {
        "indptr": (left.adj.indptr, right.adj.indptr),
        "indices": (left.adj.indices, right.adj.indices),
        "weight": (left.edge_weight, right.edge_weight),
        **{
            name: (getattr(left, name), getattr(right, name)) for name in ("x", "y", "train", "val", "test", "relation")
        },
    }
    for name, (one, other) in pairs.items():
        assert type(one) is type(other), name
        if isinstance(one, SparseFeatures):
            assert one.shape == other.shape
            one, other = one.to_dense(), other.to_dense()
        if one is not None:
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name
    assert left.stats() == right.stats()
