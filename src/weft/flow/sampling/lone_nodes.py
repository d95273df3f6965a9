"""Batches of one node: training nodes that are sampled alone, since they have no neighbours but themselves."""

from __future__ import annotations

import torch

from weft.graph.data.graph import Graph


def has_batch_of_one(graph: Graph, batch: int) -> bool:
    """Whether a batch of an epoch has one training node: the last one, or all of them."""
    return batch == 1 or graph.train.numel() % batch == 1


def lone_node(graph: Graph) -> int | None:
    """A training node without neighbours but itself, if there is one."""
    adj, train = graph.adj, graph.train.to(graph.adj.indptr.device)
    start, end = adj.indptr[train], adj.indptr[train + 1]
    lone = start == end
    one = (end - start == 1).nonzero().flatten()
    lone[one] = adj.indices[start[one]].to(train.dtype) == train[one]
    found = torch.nonzero(lone)
    return int(train[found[0, 0]]) if found.numel() else None
