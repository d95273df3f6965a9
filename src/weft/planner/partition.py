"""Partition: split a graph over ranks so that every rank has about as many edges, from row offsets alone.

The nodes of a rank are a range, found by a range-constrained binary search over the row offsets (MGG, Algorithm 1), in
plain Python over any sequence of numbers. :mod:`weft.dist.partition` does what touches every edge, with tensors.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

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
        target = total * rank // ranks
        node = bisect_left(indptr, target, bounds[-1], nodes)
        nearer = node > bounds[-1] and target - int(indptr[node - 1]) < int(indptr[node]) - target
        bounds.append(node - 1 if nearer else node)
    bounds.append(nodes)
    edges = [int(indptr[last]) - int(indptr[first]) for first, last in itertools.pairwise(bounds)]
    return Partition(tuple(bounds), tuple(edges))
