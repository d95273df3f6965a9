"""DeviceSeeds: seeds and clocks of the batches that captured steps sample themselves, made on the device.

They are made once per epoch, by kernels. A copy per batch, of however few bytes, could wait in line for a batch of the
host's that the bus is carrying.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.flow.sampling.seeds import SeedBatch, SeedOrder
from weft.ops.sampling.draws import epoch_clocks


class DeviceSeeds:
    """Of one epoch at a time; ``order`` of the training seeds, ``seed`` of all draws."""

    def __init__(self, order: SeedOrder, seed: int, device: torch.device) -> None:
        self._order, self._seed, self._device = order, seed, device
        self._made_for: tuple[int, object] | None = None
        self._ids = self._clocks = torch.empty(0)

    def of(self, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        """Seeds ``[B]`` int32 and the clock ``[3]`` int64 of a batch, both on the device, for its current stream."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        if self._made_for != (epoch, stream):
            self._make(epoch)
            self._made_for = (epoch, stream)
        size = self._order.batch_size
        return self._ids[batch * size : (batch + 1) * size], self._clocks[batch]

    def on_host(self, epoch: int, first: int = 0) -> list[SeedBatch]:
        """The batches of an epoch from ``first`` on in host memory; the device sorts them, a host takes longer."""
        self.of(epoch, 0)
        batches = self._ids.cpu().long().split(self._order.batch_size)
        return [SeedBatch(epoch, number, seeds) for number, seeds in enumerate(batches) if number >= first]

    def _make(self, epoch: int) -> None:
        ids = self._order.seeds[self._order.permutation(epoch)]
        self._ids = ids.to(self._device, torch.int32)
        self._clocks = epoch_clocks(self._seed, epoch, len(self._order), self._device)
