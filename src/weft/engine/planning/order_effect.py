"""What an order of the nodes changes: how many edges and nodes cross between ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass

from weft.dist.node_order import order_nodes, reordered
from weft.dist.partition_arrays import count_remote, halo_of, own_rows
from weft.ops.csr.adjacency import Adjacency
from weft.planner.partition import split_by_edges


@dataclass(frozen=True)
class OrderEffect:
    """What crosses between ranks in an order: share of the edges, and nodes that the rank with most of them reads.

    ``seconds``: what finding the order took. ``imbalance``: edges of the fullest rank over the mean, less 1.
    """

    order: str
    remote_edges: float
    halo_nodes: int
    imbalance: float
    seconds: float = 0.0


def order_effect(adj: Adjacency, kind: str, ranks: int) -> OrderEffect:
    """Count what crosses between ``ranks`` if the nodes of ``adj`` are in the order ``kind``."""
    begin = time.perf_counter()
    order = order_nodes(adj, kind, ranks)
    seconds = time.perf_counter() - begin
    other = adj if kind == "given" else reordered(adj, order)
    found = split_by_edges(other.indptr.cpu().numpy(), ranks)  # type: ignore[arg-type]
    remote = sum(count_remote(other, found.bounds))
    halos = []
    for rank in range(ranks):
        low, high = found.bounds[rank : rank + 2]
        halos.append(halo_of(own_rows(other, low, high)[1], low, high).numel())
    return OrderEffect(kind, remote / max(other.num_edges, 1), max(halos), found.imbalance, seconds)
