"""The graphs that benchmarks run on: the named shapes, made on the device, or a small likeness of them."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.graph.catalog import shapes
from weft.graph.graph import Graph
from weft.graph.readers import read
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency

ALIASES = {"arxiv": "ogbn-arxiv", "products": "ogbn-products", "papers100m": "ogbn-papers100M"}


def full_name(shape: str) -> str:
    """``"arxiv"`` is ``"ogbn-arxiv"``."""
    return ALIASES.get(shape, shape)


def make_graph(shape: str, device: torch.device, scale: float = 1.0) -> Graph:
    """The shape on ``device``; ``scale`` below 1 shrinks its nodes and edges, to try a benchmark out."""
    return shapes.make(full_name(shape), device=device, scale=scale)


def fresh(graph: Graph) -> Graph:
    """The same arrays without the derived matrices that an earlier cell left on them."""
    x = SparseFeatures(bare(graph.x.matrix)) if isinstance(graph.x, SparseFeatures) else graph.x
    return graph._changed(adj=bare(graph.adj), x=x)


def bare(adj: Adjacency) -> Adjacency:
    """The same arrays without anything derived from them."""
    own = {"weight": adj.weight, "row_scale": adj.row_scale, "col_scale": adj.col_scale, "symmetric": adj.symmetric}
    return Adjacency(adj.indptr, adj.indices, adj.num_cols, **own)


def row_normalised(graph: Graph) -> Graph:
    """The same graph with every node's features divided by their sum, as citation graphs are trained."""
    if not isinstance(graph.x, SparseFeatures):
        total = graph.x.sum(1, keepdim=True).clamp(min=1.0)
        return graph._changed(x=graph.x / total)
    matrix = graph.x.matrix
    rows = matrix.rows().long()
    total = torch.zeros(matrix.num_rows, device=graph.device).index_add_(0, rows, graph.x.values)
    scaled = matrix.scaled(weight=graph.x.values / total.clamp(min=1.0)[rows])
    return graph._changed(x=SparseFeatures(scaled))


def read_graph(folder: Path, name: str) -> Graph:
    """``folder/name.npz`` with normalised features."""
    return row_normalised(read(folder / f"{name}.npz"))
