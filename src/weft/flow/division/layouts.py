"""Sizes that batches are padded to: a layout per number of seeds and bucket, and the smallest that a batch fits into.

Shapes: h hops, seeds outwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from weft.core.batches.buckets import bucket_sizes, largest_batch
from weft.core.graph_stats import GraphStats


@dataclass(frozen=True)
class PaddedLayout:
    """Capacities of a batch of ``seeds``: ``rows[h]`` and ``edges[h]`` of hop h, seeds outwards, ``nodes`` of all."""

    seeds: int
    rows: tuple[int, ...]
    edges: tuple[int, ...]
    nodes: int

    @classmethod
    def of(cls, seeds: int, fanouts: Sequence[int], num_nodes: int) -> PaddedLayout:
        """The largest, as the GPU's sampler pads."""
        size = largest_batch(fanouts, seeds, num_nodes)
        return cls(seeds, size.rows, size.edges, size.nodes)

    def holds(self, rows: Sequence[int], edges: Sequence[int], nodes: int) -> bool:
        """Whether a batch of these sizes fits."""
        pairs = (*zip(rows, self.rows, strict=True), *zip(edges, self.edges, strict=True), (nodes, self.nodes))
        return all(size <= most for size, most in pairs)

    @property
    def sizes(self) -> list[int]:
        """Elements of each part of the packed structure: nodes, then offsets and neighbours of every hop."""
        return [self.nodes, *(size for r, e in zip(self.rows, self.edges, strict=True) for size in (r + 1, e))]

    def parts(self, packed: Tensor) -> list[Tensor]:
        """The parts as views of ``packed`` int32."""
        return list(packed.split(self.sizes))


@dataclass(frozen=True)
class Layouts:
    """The layouts of a graph's batches in ``buckets`` sizes; ``stats`` of the graph, if there are several."""

    fanouts: tuple[int, ...]
    num_nodes: int
    buckets: int = 1
    stats: GraphStats | None = None

    def largest(self, seeds: int) -> PaddedLayout:
        """That every batch fits into."""
        return PaddedLayout.of(seeds, self.fanouts, self.num_nodes)

    def fitting(self, seeds: int, rows: Sequence[int], edges: Sequence[int], nodes: int) -> PaddedLayout:
        """The smallest that a batch of these sizes fits into."""
        return next(
            (one for one in _smaller(self, seeds) if one.holds(rows, edges, nodes)),
            self.largest(seeds),
        )


@cache
def _smaller(layouts: Layouts, seeds: int) -> tuple[PaddedLayout, ...]:
    """All but the largest, the smallest first."""
    if layouts.stats is None or layouts.buckets == 1:
        return ()
    sizes = bucket_sizes(layouts.stats, layouts.fanouts, seeds, layouts.buckets)[:-1]
    return tuple(PaddedLayout(seeds, size.rows, size.edges, size.nodes) for size in sizes)
