"""Partition: split a graph over ranks so that every rank has about as many edges, from row offsets alone.

The nodes of a rank are a range, found by a range-constrained binary search over the row offsets (MGG, Algorithm 1).
The edges of a rank are then told apart by where their source is (local, remote), and the neighbours of a node are cut
into pieces of at most ``ps``, which bounds the work of one warp.

This is plain Python over any sequence of numbers. :mod:`weft.dist.partition` does the parts that touch every
edge with tensors; the tests compare the two.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.core.errors import SpecError


@dataclass(frozen=True)
class Partition:
    """Node ranges of ranks: rank r has the nodes ``bounds[r]`` to ``bounds[r + 1]``, with ``edges[r]`` in-edges."""

    bounds: tuple[int, ...]
    edges: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return len(self.edges)

    @property
    def imbalance(self) -> float:
        """By how much the fullest rank exceeds the mean: 0.01 is one percent."""
        total = sum(self.edges)
        return 0.0 if not total else max(self.edges) * self.ranks / total - 1.0

    def nodes(self, rank: int) -> range:
        """The nodes of ``rank``."""
        return range(self.bounds[rank], self.bounds[rank + 1])

    def owner(self, node: int) -> int:
        """The rank that has ``node``."""
        return bisect_right(self.bounds, node, 1, self.ranks) - 1

    def local_id(self, node: int) -> int:
        """Where ``node`` stands among the nodes of its rank."""
        return node - self.bounds[self.owner(node)]


def split_by_edges(indptr: Sequence[int], ranks: int) -> Partition:
    """Cut nodes into ``ranks`` ranges of about equally many in-edges, given row offsets ``indptr [N+1]``.

    Every cut is searched to the right of the one before. It goes to the node whose offset is nearest to the rank's
    share of the edges, so that what one rank has too much does not add up over those after it.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise SpecError(f"ranks={ranks!r} must be a whole number, at least 1")
    nodes = len(indptr) - 1
    total = int(indptr[nodes])
    bounds = [0]
    for rank in range(1, ranks):
        bounds.append(_nearest(indptr, total * rank // ranks, bounds[-1], nodes))
    bounds.append(nodes)
    edges = [int(indptr[last]) - int(indptr[first]) for first, last in itertools.pairwise(bounds)]
    return Partition(tuple(bounds), tuple(edges))


def _nearest(indptr: Sequence[int], target: int, low: int, high: int) -> int:
    """The node in ``low..high`` at which as close to ``target`` edges as possible lie to the left."""
    right = bisect_left(indptr, target, low, high)
    if right > low and target - int(indptr[right - 1]) < int(indptr[right]) - target:
        return right - 1
    return right


@dataclass(frozen=True)
class ShardEdges:
    """The in-edges of one rank's nodes as two CSR matrices over the rank's rows.

    ``local_indices`` are ids among the rank's own nodes; ``remote_indices`` are places in ``halo``, the sorted global
    ids of the remote nodes that the rank reads.
    """

    local_indptr: list[int] = field(default_factory=lambda: [0])
    local_indices: list[int] = field(default_factory=list)
    remote_indptr: list[int] = field(default_factory=lambda: [0])
    remote_indices: list[int] = field(default_factory=list)
    halo: list[int] = field(default_factory=list)


def shard_edges(indptr: Sequence[int], indices: Sequence[int], partition: Partition, rank: int) -> ShardEdges:
    """The local and the remote edges of ``rank``."""
    own = partition.nodes(rank)
    every = range(int(indptr[own.start]), int(indptr[own.stop]))
    found = ShardEdges(halo=sorted({int(indices[edge]) for edge in every if int(indices[edge]) not in own}))
    place = {node: index for index, node in enumerate(found.halo)}
    for node in own:
        for edge in range(int(indptr[node]), int(indptr[node + 1])):
            source = int(indices[edge])
            if source in own:
                found.local_indices.append(source - own.start)
            else:
                found.remote_indices.append(place[source])
        found.local_indptr.append(len(found.local_indices))
        found.remote_indptr.append(len(found.remote_indices))
    return found


@dataclass(frozen=True)
class NeighbourPieces:
    """Pieces of at most ``ps`` neighbours: ``row``, first edge ``start`` and ``length`` of each."""

    row: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)


def neighbour_pieces(indptr: Sequence[int], ps: int) -> NeighbourPieces:
    """Cut the edges of every row into pieces of at most ``ps``, in order."""
    if ps < 1:
        raise SpecError(f"ps={ps} must be at least 1")
    pieces = NeighbourPieces()
    for row in range(len(indptr) - 1):
        for start in range(int(indptr[row]), int(indptr[row + 1]), ps):
            pieces.row.append(row)
            pieces.start.append(start)
            pieces.length.append(min(ps, int(indptr[row + 1]) - start))
    return pieces
