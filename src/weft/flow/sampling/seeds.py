"""The order of the training seeds: a permutation per epoch, cut into batches, resumable anywhere.

Shapes: S seeds, B batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.random.torch_bits import signed64, splitmix

ORDER_STREAM = 0x5EED  # keeps these draws apart from those of the samplers


@dataclass(frozen=True)
class SeedBatch:
    """Seeds ``[B]`` of one batch and which batch it is."""

    epoch: int
    batch: int
    seeds: Tensor

    def tensors(self) -> list[Tensor]:
        """Every array of it."""
        return [self.seeds]


class SeedOrder:
    """Batches of ``batch_size`` seeds in an order that depends on (seed, epoch) alone; the last one may be smaller."""

    def __init__(self, seeds: Tensor, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        if batch_size < 1:
            raise InputError(f"batch={batch_size} must be at least 1 seed per batch")
        if seeds.numel() == 0:
            raise InputError("there are no training seeds; give the graph a train split")
        self.seeds, self.batch_size, self.seed, self.shuffle = seeds, batch_size, seed, shuffle

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self.seeds.numel() // self.batch_size)

    def permutation(self, epoch: int) -> Tensor:
        """The order ``[S]`` int64 of the seeds in an epoch: sorted by random 64-bit keys."""
        count = self.seeds.numel()
        places = torch.arange(count, device=self.seeds.device)
        if not self.shuffle:
            return places
        key = torch.tensor([signed64(self.seed), signed64(epoch)], device=self.seeds.device)
        key = splitmix(splitmix(splitmix(key[0]) + key[1]) + ORDER_STREAM)
        # A sort by full 64-bit keys: equal ones are too rare to matter and keep their order.
        return torch.sort(splitmix(key ^ splitmix(places)), stable=True).indices

    def epoch(self, epoch: int, start: int = 0) -> Iterator[SeedBatch]:
        """The batches of an epoch from batch ``start`` on."""
        if not 0 <= start <= len(self):
            raise InputError(f"batch {start} must be from 0 to {len(self)}, the batches of an epoch")
        order = self.permutation(epoch)
        for batch in range(start, len(self)):
            part = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield SeedBatch(epoch, batch, self.seeds[part])

    def epochs(self, count: int, epoch: int = 0, batch: int = 0) -> Iterator[SeedBatch]:
        """The batches of all epochs up to ``count``, resumed at (epoch, batch)."""
        for number in range(epoch, count):
            yield from self.epoch(number, batch if number == epoch else 0)
