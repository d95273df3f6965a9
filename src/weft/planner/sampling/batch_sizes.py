"""Expected sizes of sampled batches, from a graph's summary alone.

Nodes are grouped by degree, as the histogram of a :class:`GraphStats` has them. A pick of a neighbour hits a node in
proportion to its degree (the picks of an edge-uniform draw), so of ``p`` picks a node of degree d is hit at least once
with probability ``1 - exp(-p d / E)``. In a directed graph out-degrees are not known and all nodes count as equally
likely, which makes batches a little too large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.graph_stats import GraphStats
from weft.core.settings.fanout import Hop, picks_per_hop


@dataclass(frozen=True)
class NodeKind:
    """``count`` nodes of about this ``degree``; ``known``: how many of them a batch is expected to have."""

    degree: float
    count: float
    known: float = 0.0


@dataclass(frozen=True)
class ExpectedBatch:
    """A batch as it is expected: nodes whose features are read, by kind, and edges picked, hop by hop."""

    kinds: tuple[NodeKind, ...]
    rows: tuple[float, ...]
    edges: tuple[float, ...]

    @property
    def nodes(self) -> float:
        """Nodes whose features are read."""
        return sum(kind.known for kind in self.kinds)

    def hit_rate(self, rows: float) -> float:
        """Share of the nodes that a cache of ``rows`` rows has, those of the highest degree."""
        hits, left = 0.0, rows
        for kind in sorted(self.kinds, key=lambda kind: -kind.degree):
            taken = min(left, kind.count)
            hits += kind.known * taken / max(kind.count, 1.0)
            left -= taken
        return min(hits / max(self.nodes, 1.0), 1.0)


def expected_batch(stats: GraphStats, fanouts: Sequence[Hop], seeds: int) -> ExpectedBatch:
    """The batch of ``seeds`` random seeds; hop h samples for every node found before it.

    A fan-out per relation counts as their sum: as if a node had edges of all of them, which is the most it picks.
    """
    kinds = [NodeKind(k.degree, k.count, seeds * k.count / max(stats.num_nodes, 1)) for k in _kinds(stats)]
    rows, edges = [], []
    for fanout in picks_per_hop(fanouts, stats):
        rows.append(sum(kind.known for kind in kinds))
        picks = sum(kind.known * _picks(kind.degree, fanout) for kind in kinds)
        edges.append(picks)
        kinds = [_after(kind, picks, stats) for kind in kinds]
    return ExpectedBatch(tuple(kinds), tuple(rows), tuple(edges))


def _picks(degree: float, fanout: int) -> float:
    return degree if fanout < 0 else min(degree, float(fanout))


def _after(kind: NodeKind, picks: float, stats: GraphStats) -> NodeKind:
    """What is known of a kind after so many picks."""
    share = kind.degree / max(stats.num_edges, 1) if stats.symmetric else 1.0 / max(stats.num_nodes, 1)
    found = (kind.count - kind.known) * -math.expm1(-picks * share)
    return NodeKind(kind.degree, kind.count, kind.known + max(found, 0.0))


def _kinds(stats: GraphStats) -> list[NodeKind]:
    """Nodes by degree: a bin of the histogram each, its degree in the middle, scaled to the number of edges."""
    if not stats.degree_histogram:
        return [NodeKind(stats.num_edges / max(stats.num_nodes, 1), stats.num_nodes)]
    bins = [(_middle(length, stats.max_degree), count) for length, count in enumerate(stats.degree_histogram) if count]
    scale = stats.num_edges / max(sum(degree * count for degree, count in bins), 1.0)
    return [NodeKind(degree * scale, count) for degree, count in bins]


def _middle(length: int, most: int) -> float:
    """A degree that stands for those of a bit length: numbers thin out towards the upper end."""
    if length <= 1:
        return float(length)
    low, high = 1 << (length - 1), min((1 << length) - 1, most or (1 << length))
    return math.sqrt(low * max(high, low))
