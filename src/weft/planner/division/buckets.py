"""Batch buckets: what padding to several sizes saves of training, and what its recordings take.

Rows that only pad are multiplied, activated and stored like others; edges that do not exist are not followed. So of a
captured step the products and pointwise passes shrink with the rows of the size that a batch is padded to, and the
aggregations and launches stay. Every size more is another recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.core.batches.batch_sizes import LargeBatch
from weft.core.batches.buckets import bucket_shares, bucket_sizes
from weft.core.cost import Cost
from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.planner.sampling.transfers import row_bytes

RECORDING_SECONDS = 0.4  # of a warm-up and a capture of a step: 0.3 s were measured on an H200 for a stacked GCN
FOLLOWS_EDGES = ("spmm", "attention", "scatter", "launch")  # families of operators that padding rows do not lengthen


@dataclass(frozen=True)
class Padding:
    """Batches in ``buckets`` sizes: the share of the largest size's rows that is computed, on average.

    ``training``: what is left of the training's seconds; ``device_bytes``: of the inputs of the recordings beyond the
    first; ``seconds``: of making those, once.
    """

    buckets: int
    rows: float
    training: float
    device_bytes: int
    seconds: float

    def per_epoch(self, epochs: int) -> float:
        """Seconds of recordings that an epoch pays for."""
        return self.seconds / max(epochs, 1)


def padding(task: Task, stats: GraphStats, training: Cost, buckets: int) -> Padding:
    """Of the batches of ``task``; ``training``: cost of an epoch with batches of one size."""
    seeds = min(task.batch, max(stats.num_train, 1))
    sizes = bucket_sizes(stats, task.fanouts, seeds, buckets)
    whole = max(sum(sizes[-1].rows), 1)
    rows = sum(share * sum(size.rows) / whole for share, size in zip(bucket_shares(buckets), sizes, strict=True))
    padded = _padded_share(training.families)
    held = sum(_bytes(size, row_bytes(task, stats)) for size in sizes[:-1])
    return Padding(buckets, rows, 1.0 - padded * (1.0 - rows), held, (buckets - 1) * RECORDING_SECONDS)


def _padded_share(families: Mapping[str, float]) -> float:
    """Of the seconds by family of operator those that grow with the rows; half of them if no families are known."""
    whole = sum(families.values())
    if not whole:
        return 0.5
    return sum(seconds for name, seconds in families.items() if name not in FOLLOWS_EDGES) / whole


def _bytes(size: LargeBatch, row: int) -> int:
    return size.nodes * (row + 4) + 4 * (sum(size.rows) + sum(size.edges))
