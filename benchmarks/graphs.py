"""The graphs that benchmarks run on: the named shapes, made on the device, or a small likeness of them."""

from __future__ import annotations

import torch

from weft.graph.graph import Graph
from weft.ops.adjacency import Adjacency

ALIASES = {"arxiv": "ogbn-arxiv", "products": "ogbn-products", "papers100m": "ogbn-papers100M"}


def full_name(shape: str) -> str:
    """``"arxiv"`` is ``"ogbn-arxiv"``."""
    return ALIASES.get(shape, shape)


def make_graph(shape: str, device: torch.device, scale: float = 1.0) -> Graph:
    """The shape on ``device``; ``scale`` below 1 shrinks its nodes and edges, to try a benchmark out."""
    from weft.graph import shapes

    if scale == 1.0:
        return shapes.make(full_name(shape), device=device)
    return shapes.make(full_name(shape), device=device, scale=scale)


def fresh(graph: Graph) -> Graph:
    """The same arrays without the derived matrices that an earlier cell left on the adjacency."""
    adj = graph.adj
    bare = Adjacency(adj.indptr, adj.indices, adj.num_cols, weight=adj.weight, symmetric=adj.symmetric)
    return graph._changed(adj=bare)
