"""The two sides with batches of their exact size: sampled and gathered on a CPU, or by a GPU out of pinned memory.

The host's batches lie in pinned memory where a GPU trains, at most as many at once as the division allows.
"""

from __future__ import annotations

import threading

import torch

from weft.core.errors import TrainingError
from weft.flow.division.sides import DeviceSide, HostSide
from weft.flow.features.feature_store import FeatureStore
from weft.flow.sampling.batch import MiniBatch, Subgraph
from weft.flow.sampling.sampler import NeighbourSampler
from weft.flow.sampling.seeds import SeedBatch
from weft.flow.stages.streams import OnDevice
from weft.ops.sampling.gather_rows import gather_rows_cpu

Sampled = MiniBatch | Subgraph


class PinnedSlots:
    """Counts the prepared batches in host memory; more than ``most`` at once is a fault of the schedule."""

    def __init__(self, most: int) -> None:
        self.most, self.used, self.longest = most, 0, 0
        self._lock = threading.Lock()

    def take(self) -> None:
        """One more batch."""
        with self._lock:
            if self.used >= self.most:
                raise TrainingError(f"{self.used + 1} batches in pinned memory where the plan allows {self.most}")
            self.used += 1
            self.longest = max(self.longest, self.used)

    def give_back(self) -> None:
        """One batch less."""
        with self._lock:
            self.used -= 1


class ExactHost(HostSide):
    """Compiled sampling and gathering on the CPU; features ``x [N, F]`` in host memory."""

    def __init__(self, sampler: NeighbourSampler, x: torch.Tensor, device: torch.device, slots: int) -> None:
        self._sampler, self._x, self._device = sampler, x, device
        self.slots = PinnedSlots(slots)
        self._pins = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pins else None

    def prepare(self, seeds: SeedBatch) -> Sampled:
        """Sample and gather, in the calling thread alone."""
        self.slots.take()
        batch = self._sampler.sample(seeds.seeds.cpu(), seeds.epoch, seeds.batch)
        nodes = batch.input_nodes
        rows = torch.empty(nodes.numel(), self._x.shape[1], dtype=self._x.dtype, pin_memory=self._pins)
        return batch.with_data(gather_rows_cpu(self._x, nodes, rows, shares=1))

    def transfer(self, item: Sampled) -> Sampled | OnDevice:
        """Copy to the device; on a CPU the batch gets memory of its own, as it would there."""
        if self._stream is None:
            return item.with_data(None if item.x is None else item.x.clone())
        with torch.cuda.stream(self._stream):
            moved, ready = item.to(self._device, non_blocking=True), torch.cuda.Event()
            ready.record()
        ready.synchronize()
        return OnDevice(moved, ready)

    def discard(self, item: Sampled) -> None:
        """One batch less in host memory."""
        self.slots.give_back()


class ExactDevice(DeviceSide):
    """What trains samples and reads features itself."""

    def __init__(self, sampler: NeighbourSampler, store: FeatureStore) -> None:
        self._sampler, self._store = sampler, store

    def batch(self, seeds: SeedBatch) -> Sampled:
        """Sample."""
        return self._sampler.sample(seeds.seeds, seeds.epoch, seeds.batch)

    def read(self, item: Sampled) -> Sampled:
        """Features of the input nodes."""
        return item.with_data(self._store.read(item.input_nodes))
