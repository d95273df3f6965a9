"""Expected sizes of sampled batches, from a graph's summary alone.

Nodes are grouped by degree, as the histogram of a :class:`GraphStats` has them. A pick of a neighbour hits a node in
proportion to its degree (the picks of an edge-uniform draw), so of ``p`` picks a node of degree d is hit at least once
with probability ``1 - exp(-p d / E)``. In a directed graph out-degrees are not known and all nodes count as equally
likely, which makes batches a little too large.

Every hop samples for all nodes found so far, so a node's list is drawn from again and again: of ``f`` picks among d
neighbours of which a share u has not been picked yet, ``f u`` are new, and u falls by ``1 - f / d``. In an undirected
graph a node that was just found has one neighbour that is known, the one it was found from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weft.core.graph_stats import GraphStats
from weft.core.settings import Hop, picks_per_hop

DEVIATIONS = 3.0  # standard deviations above the expected size that hardly any batch exceeds
PARTS = 3  # of a bin of the histogram: within it low degrees prevail, and hits are no straight line in the degree


@dataclass(frozen=True)
class NodeKind:
    """``count`` nodes of about this ``degree``; ``known``: how many of them a batch is expected to have.

    ``found``: the same by the hop that found them, each with the share of their neighbours that no pick has hit yet.
    """

    degree: float
    count: float
    found: tuple[tuple[float, float], ...] = ()

    @property
    def known(self) -> float:
        """Nodes of this kind in a batch."""
        return sum(nodes for nodes, _ in self.found)

    def picks(self, fanout: int) -> float:
        """Neighbours that one node of this kind picks."""
        return self.degree if fanout < 0 else min(self.degree, float(fanout))

    def after(self, fanout: int, new_picks: float, stats: GraphStats) -> NodeKind:
        """After a hop that picked for all that are known; ``new_picks``: of all kinds, which no hop made before."""
        left = max(1.0 - self.picks(fanout) / max(self.degree, 1e-9), 0.0)
        sampled = ((nodes, unseen * left) for nodes, unseen in self.found)
        share = self.degree / max(stats.num_edges, 1) if stats.symmetric else 1.0 / max(stats.num_nodes, 1)
        more = (self.count - self.known) * -math.expm1(-new_picks * share)
        unseen = max(1.0 - 1.0 / max(self.degree, 1.0), 0.0) if stats.symmetric else 1.0
        return replace(self, found=(*sampled, (max(more, 0.0), unseen)))


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
    kinds = [replace(k, found=((seeds * k.count / max(stats.num_nodes, 1), 1.0),)) for k in _kinds(stats)]
    rows, edges = [], []
    for fanout in picks_per_hop(fanouts, stats):
        rows.append(sum(kind.known for kind in kinds))
        edges.append(sum(kind.known * kind.picks(fanout) for kind in kinds))
        new = sum(kind.picks(fanout) * sum(nodes * unseen for nodes, unseen in kind.found) for kind in kinds)
        kinds = [kind.after(fanout, new, stats) for kind in kinds]
    return ExpectedBatch(tuple(kinds), tuple(rows), tuple(edges))


@dataclass(frozen=True)
class LargeBatch:
    """Sizes that hardly any batch exceeds: rows and edges hop by hop, seeds outwards, and nodes."""

    rows: tuple[int, ...]
    edges: tuple[int, ...]
    nodes: int


def large_batch(stats: GraphStats, fanouts: Sequence[Hop], seeds: int) -> LargeBatch:
    """A batch :data:`DEVIATIONS` standard deviations above the expected one.

    What one seed leads to deviates by about as much as it is, or as its picks do where degrees differ more; that of S
    seeds by its part of the square root of S.
    """
    first = picks_per_hop(fanouts, stats)[0] if fanouts else 0
    kinds, all_nodes = _kinds(stats), max(stats.num_nodes, 1)
    mean = sum(kind.count * kind.picks(first) for kind in kinds) / all_nodes
    square = sum(kind.count * kind.picks(first) ** 2 for kind in kinds) / all_nodes
    deviation = max(math.sqrt(max(square - mean * mean, 0.0)) / max(mean, 1e-9), 1.0)  # of a seed's picks, by the mean
    expected = expected_batch(stats, fanouts, seeds)
    more = 1.0 + DEVIATIONS * deviation / math.sqrt(max(seeds, 1))
    rows = (seeds, *(math.ceil(more * count) for count in expected.rows[1:]))
    nodes = min(math.ceil(more * expected.nodes), max(stats.num_nodes, seeds))
    return LargeBatch(rows, tuple(math.ceil(more * count) for count in expected.edges), nodes)


def _kinds(stats: GraphStats) -> list[NodeKind]:
    """Nodes by degree: some parts of every bin of the histogram, scaled to the number of edges."""
    if not stats.degree_histogram:
        return [NodeKind(stats.num_edges / max(stats.num_nodes, 1), stats.num_nodes)]
    bins = [
        (degree, share * count)
        for length, count in enumerate(stats.degree_histogram)
        if count
        for degree, share in _parts(length, stats.max_degree)
    ]
    scale = stats.num_edges / max(sum(degree * count for degree, count in bins), 1.0)
    return [NodeKind(degree * scale, count) for degree, count in bins]


def _parts(length: int, most: int) -> list[tuple[float, float]]:
    """Degrees that stand for those of a bit length, and their shares: numbers fall as a power law's, by the square."""
    if length <= 1:
        return [(float(length), 1.0)]
    low = float(1 << (length - 1))
    high = max(min(2.0 * low, (most or 2.0 * low) + 1.0), low + 1.0)
    ends = [low * (high / low) ** (part / PARTS) for part in range(PARTS + 1)]
    whole = 1.0 / low - 1.0 / high
    return [(math.sqrt(begin * end), (1.0 / begin - 1.0 / end) / whole) for begin, end in pairwise(ends)]
