"""Graphs for the tests of sampled training."""

from __future__ import annotations

import torch

from weft.graph.graph import Graph

NODES = 80


def random_graph(seed: int = 0, weighted: bool = False, relations: int = 0, directed: bool = True) -> Graph:
    """80 nodes, 600 edges, a hub (node 5), a node without in-edges (node 79)."""
    random = torch.Generator().manual_seed(seed)
    src, dst = (torch.randint(0, NODES, (600,), generator=random) for _ in range(2))
    dst[:70], src[:70] = 5, torch.arange(70)
    keep = dst != NODES - 1
    src, dst = src[keep], dst[keep]
    weight = torch.rand(src.numel(), generator=random) if weighted else None
    relation = torch.randint(0, relations, (src.numel(),), generator=random) if relations else None
    x = torch.randn(NODES, 6, generator=random)
    y = torch.arange(NODES) % 3
    return Graph.from_edges(
        src, dst, NODES, x=x, y=y, edge_weight=weight, relation=relation, directed=directed, train=torch.arange(40)
    )
