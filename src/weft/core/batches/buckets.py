"""Buckets: sizes that the batches of captured steps are padded to.

A step is captured once per size. With one size, batches are padded to the most that their fan-outs allow; with more, a
batch takes the smallest size that it fits into, and the largest is always among them. The size depends on the batch
alone, so it does not matter who prepares it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from weft.core.batches.batch_sizes import LargeBatch, large_batch
from weft.core.graph_stats import GraphStats
from weft.core.settings.fanout import Hop, picks_per_hop

MOST_BUCKETS = 3
# Standard deviations above the expected size, of the sizes below the largest: nearly all batches fit into the last.
ABOVE: dict[int, tuple[float, ...]] = {1: (), 2: (3.0,), 3: (0.5, 3.0)}


def largest_batch(fanouts: Sequence[int], seeds: int, num_nodes: int) -> LargeBatch:
    """The most that fan-outs allow, as the GPU's sampler pads: duplicates among the seeds keep their rows."""
    rows, edges, count = [], [], seeds
    for fanout in fanouts:
        rows.append(count)
        edges.append(count * fanout)
        count = min(count * (fanout + 1), seeds + num_nodes)
    return LargeBatch(tuple(rows), tuple(edges), count)


def bucket_sizes(stats: GraphStats, fanouts: Sequence[Hop], seeds: int, count: int) -> tuple[LargeBatch, ...]:
    """``count`` sizes for batches of ``seeds``, the smallest first and the largest possible last."""
    whole = largest_batch(picks_per_hop(fanouts, stats), seeds, stats.num_nodes)
    return (*(_within(large_batch(stats, fanouts, seeds, above), whole) for above in ABOVE[count]), whole)


def _within(size: LargeBatch, whole: LargeBatch) -> LargeBatch:
    rows, edges = (
        tuple(min(pair) for pair in zip(*both, strict=True))
        for both in ((size.rows, whole.rows), (size.edges, whole.edges))
    )
    return LargeBatch(rows, edges, min(size.nodes, whole.nodes))


def bucket_shares(count: int) -> tuple[float, ...]:
    """The share of the batches that takes each of ``count`` sizes, if sizes deviate as a normal distribution does."""
    below = [0.5 * (1.0 + math.erf(above / math.sqrt(2.0))) for above in ABOVE[count]]
    ends = [0.0, *below, 1.0]
    return tuple(after - before for before, after in itertools.pairwise(ends))
