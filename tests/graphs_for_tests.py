"""Graphs for tests: adjacencies, graphs small enough to train on, summaries of large ones, and comparisons."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.core.graph_stats import GraphStats
from weft.core.models import traits_of
from weft.graph import Graph, SparseFeatures
from weft.ops import Adjacency

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
NODES, FEATURES, CLASSES = 60, 9, 3

# ogbn-products: node, edge, feature and class counts and splits of the dataset; the histogram only has its shape.
PRODUCTS = GraphStats(
    name="products",
    num_nodes=2_449_029,
    num_edges=123_718_280,
    num_features=100,
    num_classes=47,
    symmetric=True,
    num_relations=3,
    relation_edges=(100_000_000, 20_000_000, 3_718_280),
    relation_rows=6_000_000,
    max_degree=17_481,
    degree_histogram=(0, 100_000, 200_000, 300_000, 400_000, 500_000, 600_000, 300_000, 40_000, 8_000, 1_000, 29),
    num_train=196_615,
    num_val=39_323,
    num_test=2_213_091,
)


# ---- graphs to train on --------------------------------------------------------------------------------


def small(model="gcn") -> dict[str, int]:
    """Settings for a small model of this name, or of one of these names: those that it reads."""
    rows = [traits_of(one) for one in (model if isinstance(model, (list, tuple)) else [model])]
    read = {name for row in rows if row is not None for name in row.settings}
    return {name: value for name, value in {"hidden": 8, "heads": 2}.items() if name in read}


def tiny_graph(seed: int = 0, sparse: bool = False, multilabel: bool = False, weighted: bool = False) -> Graph:
    """60 nodes, classes that features and edges tell something about, 24/16/20 nodes in the splits."""
    random = torch.Generator().manual_seed(seed)
    y = torch.arange(NODES) % CLASSES
    src, dst = (torch.randint(0, NODES, (240,), generator=random) for _ in range(2))
    kept = (y[src] == y[dst]) | (torch.rand(240, generator=random) < 0.3)
    x = torch.randn(NODES, FEATURES, generator=random)
    x[torch.arange(NODES), y] += 1.5
    if sparse:
        x = SparseFeatures.from_torch(torch.where(x > 0.8, x, torch.zeros(())))
    labels = y
    if multilabel:
        labels = torch.stack([(y == c) | (torch.rand(NODES, generator=random) < 0.2) for c in range(4)], 1).float()
    weight = torch.rand(int(kept.sum()), generator=random) if weighted else None
    graph = Graph.from_edges(
        src[kept], dst[kept], NODES, x=x, y=labels, edge_weight=weight, directed=False, name="tiny"
    )
    return with_relations(graph).random_split(train=24, val=16, seed=seed)


def with_relations(graph: Graph, relations: int = 4) -> Graph:
    """The same graph with a relation per edge, for the models that read it."""
    relation = torch.arange(graph.num_edges, dtype=torch.int32) % relations
    fields = (graph.x, graph.y, graph.train, graph.val, graph.test, relation, graph.name)
    return Graph(graph.adj, *fields, num_classes=graph.num_classes, num_relations=relations)


def random_graph(
    nodes: int = 300,
    edges: int = 2000,
    features: int = 12,
    classes: int = 5,
    *,
    directed: bool = False,
    sparse: bool = False,
    multilabel: bool = False,
    weighted: bool = False,
) -> Graph:
    """A small graph without self loops, with labels and three splits."""
    draw = torch.Generator().manual_seed(7)
    src = torch.randint(nodes, (edges,), generator=draw)
    dst = (src + 1 + torch.randint(nodes - 1, (edges,), generator=draw)) % nodes
    x = torch.rand(nodes, features, generator=draw)
    x = (x * (x > 0.8)).to_sparse() if sparse else x
    y = torch.arange(nodes) % classes
    order = torch.randperm(nodes, generator=draw)
    graph = Graph.from_edges(
        src,
        dst,
        nodes,
        x,
        torch.nn.functional.one_hot(y, classes) if multilabel else y,
        order[: nodes // 3],
        order[nodes // 3 : nodes // 2],
        order[nodes // 2 :],
        edge_weight=torch.rand(edges, generator=draw) + 0.5 if weighted else None,
        directed=directed,
    )
    return with_relations(graph, 3)


def without_histogram(stats: GraphStats) -> GraphStats:
    """A summary that knows counts alone."""
    return replace(stats, degree_histogram=(), max_degree=0)


# ---- a graph with every field, and comparisons ---------------------------------------------------------


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


# ---- adjacencies, ordinary ones and awkward ones -------------------------------------------------------


def from_pairs(rows: Tensor, cols: Tensor, num_rows: int, num_cols: int, **factors: Tensor | None) -> Adjacency:
    """The adjacency of the distinct pairs (destination, source)."""
    keys = torch.unique(rows.long() * num_cols + cols.long())
    indptr = torch.zeros(num_rows + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(keys // max(num_cols, 1), minlength=num_rows).cumsum(0)
    return Adjacency(indptr, (keys % max(num_cols, 1)).to(torch.int32), num_cols, **factors)


def mixed(seed: int = 0, num_rows: int = 24, num_cols: int = 19) -> Adjacency:
    """Rectangular, a third full; row 3 is joined to every column, the first and the middle row to none."""
    random = torch.Generator().manual_seed(seed)
    there = torch.rand(num_rows, num_cols, generator=random) < 0.3
    there[3] = True
    there[[0, num_rows // 2]] = False
    return from_pairs(*there.nonzero(as_tuple=True), num_rows, num_cols)


def empty() -> Adjacency:
    """Nodes without a single edge."""
    none = torch.zeros(0, dtype=torch.int64)
    return from_pairs(none, none, 5, 5)


def no_rows() -> Adjacency:
    """Not even a row."""
    none = torch.zeros(0, dtype=torch.int64)
    return from_pairs(none, none, 0, 4)


def loops() -> Adjacency:
    """Every node joined to itself alone."""
    return from_pairs(torch.arange(6), torch.arange(6), 6, 6)


def star() -> Adjacency:
    """Node 0 hears from all, all others from node 0 alone."""
    others = torch.arange(1, 33)
    hub = torch.zeros_like(others)
    return from_pairs(torch.cat([hub, others]), torch.cat([others, hub]), 33, 33)


def isolated() -> Adjacency:
    """Two edges among ten nodes, one of them from the first node and one into the last."""
    return from_pairs(torch.tensor([4, 9]), torch.tensor([0, 4]), 10, 10)


def wide_offsets() -> Adjacency:
    """The offsets of a graph of more than 2^31 edges."""
    adj = mixed()
    return Adjacency(adj.indptr.long(), adj.indices, adj.num_cols)


GRAPHS = {
    "mixed": mixed,
    "empty": empty,
    "no rows": no_rows,
    "loops": loops,
    "star": star,
    "isolated": isolated,
    "wide offsets": wide_offsets,
}


@st.composite
def adjacencies(draw: st.DrawFn) -> Adjacency:
    """Any small adjacency."""
    num_rows, num_cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    cells = st.integers(0, num_rows * num_cols - 1)
    chosen = torch.tensor(sorted(draw(st.sets(cells, max_size=40))), dtype=torch.int64)
    return from_pairs(chosen // num_cols, chosen % num_cols, num_rows, num_cols)


def neighbourhoods(adj: Adjacency) -> list[tuple[int, slice, Tensor]]:
    """``(row, its edges, their sources)`` of every row: the way the plain formulas of the tests visit a graph."""
    ends = adj.indptr.tolist()
    spans = [slice(a, b) for a, b in pairwise(ends)]
    return [(row, span, adj.indices[span].long()) for row, span in enumerate(spans)]
