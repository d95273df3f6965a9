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
    """Of two epochs at a time, the one in training and the next; ``order`` of the seeds, ``seed`` of all draws."""

    def __init__(self, order: SeedOrder, seed: int, device: torch.device) -> None:
        self._order, self._seed, self._device = order, seed, device
        self._made: dict[tuple[int, object], tuple[Tensor, Tensor]] = {}  # seeds and clocks by epoch and stream

    def of(self, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        """Seeds ``[B]`` int32 and the clock ``[3]`` int64 of a batch, both on the device, for its current stream."""
        ids, clocks = self._of_epoch(epoch)
        size = self._order.batch_size
        return ids[batch * size : (batch + 1) * size], clocks[batch]

    def on_host(self, epoch: int, first: int = 0) -> list[SeedBatch]:
        """The batches of an epoch from ``first`` on in host memory; the device sorts them, a host takes longer."""
        batches = self._of_epoch(epoch)[0].cpu().long().split(self._order.batch_size)
        return [SeedBatch(epoch, number, seeds) for number, seeds in enumerate(batches) if number >= first]

    def _of_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        if (epoch, stream) not in self._made:
            newest = list(self._made.items())[-1:]
            ids = self._order.seeds[self._order.permutation(epoch)].to(self._device, torch.int32)
            clocks = epoch_clocks(self._seed, epoch, len(self._order), self._device)
            self._made = {**dict(newest), (epoch, stream): (ids, clocks)}
        return self._made[epoch, stream]
