"""Graphs and summaries that the tests of capture share."""

from __future__ import annotations

from dataclasses import replace

import torch

import weft
from weft.core.graph_stats import GraphStats

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
) -> weft.Graph:
    """A small graph without self loops, with labels and three splits."""
    draw = torch.Generator().manual_seed(7)
    src = torch.randint(nodes, (edges,), generator=draw)
    dst = (src + 1 + torch.randint(nodes - 1, (edges,), generator=draw)) % nodes
    x = torch.rand(nodes, features, generator=draw)
    x = (x * (x > 0.8)).to_sparse() if sparse else x
    y = torch.arange(nodes) % classes
    order = torch.randperm(nodes, generator=draw)
    graph = weft.Graph.from_edges(
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
    fields = (graph.x, graph.y, graph.train, graph.val, graph.test)
    relation = torch.arange(graph.num_edges, dtype=torch.int32) % 3  # for the models that read it
    return weft.Graph(graph.adj, *fields, relation=relation, num_classes=graph.num_classes)


def without_histogram(stats: GraphStats) -> GraphStats:
    """A summary that knows counts alone."""
    return replace(stats, degree_histogram=(), max_degree=0)
