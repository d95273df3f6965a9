"""DeviceBatch: seeds and a clock, from which the step itself samples, gathers and builds a batch on the GPU.

So one CUDA graph does all of it: a replay reads ``seeds [S]`` int32 and ``clock [3]`` int64 again. Or two: one that
fetches into buffers, one that trains on them, so that the next batch is fetched meanwhile
(:mod:`weft.runtime.overlapped_steps`).

Shapes: S seeds, M nodes of a padded batch, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from weft.ops.sampling.compact_triton import DeviceHop
from weft.runtime.batches.source import Batch


@dataclass(frozen=True)
class Fetched:
    """What a batch is built from: padded hops, seeds outwards, features ``x [M, F]`` and the seeds' labels."""

    hops: tuple[DeviceHop, ...]
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class DeviceBatch(Batch):
    """A batch that is made on the GPU; ``fetch(batch, place)`` and ``build(batch, fetched)`` are its source's."""

    seeds: Tensor | None = None
    clock: Tensor | None = None
    fetch: Callable[[DeviceBatch, int], Fetched] | None = None
    build: Callable[[DeviceBatch, Fetched], Batch] | None = None

    def fetched(self, place: int) -> Fetched:
        """Sample and gather into buffers number ``place``."""
        assert self.fetch is not None
        return self.fetch(self, place)

    def built(self, fetched: Fetched) -> Batch:
        """The padded batch."""
        assert self.build is not None
        return self.build(self, fetched)
