"""The two sides with batches padded to their capacity on a GPU, so that the training step can be captured.

The host packs the structure of a batch into one pinned buffer in the layout that the GPU's own sampler gives, so a
transfer is two copies. Whoever prepares a batch, the arrays that exist are equal, and rows beyond them are zeros.

Shapes: S seeds, N nodes, M node capacity, F features.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.flow.division.exact_batches import PinnedSlots
from weft.flow.division.sides import DeviceSide, HostSide
from weft.flow.features.feature_store import FeatureStore
from weft.flow.sampling.batch import MiniBatch
from weft.flow.sampling.sampler import NeighbourSampler
from weft.flow.sampling.seeds import SeedBatch
from weft.flow.stages.streams import OnDevice
from weft.ops.sampling.compact_triton import DeviceHop
from weft.ops.sampling.draws import make_clock
from weft.ops.sampling.gather_rows import gather_rows_cpu

SPARE_ROWS = 1.1  # rows of a pinned buffer beyond the largest batch so far


@dataclass(frozen=True)
class PaddedLayout:
    """Capacities of a batch of ``seeds``: ``rows[h]`` and ``edges[h]`` of hop h, seeds outwards, ``nodes`` of all."""

    seeds: int
    rows: tuple[int, ...]
    edges: tuple[int, ...]
    nodes: int

    @classmethod
    def of(cls, seeds: int, fanouts: Sequence[int], num_nodes: int) -> PaddedLayout:
        """As the GPU's sampler pads: duplicates among the seeds keep their rows."""
        rows, edges, count = [], [], seeds
        for fanout in fanouts:
            rows.append(count)
            edges.append(count * fanout)
            count = min(count * (fanout + 1), seeds + num_nodes)
        return cls(seeds, tuple(rows), tuple(edges), count)

    @property
    def sizes(self) -> list[int]:
        """Elements of each part of the packed structure: nodes, then offsets and neighbours of every hop."""
        return [self.nodes, *(size for r, e in zip(self.rows, self.edges, strict=True) for size in (r + 1, e))]

    def parts(self, packed: Tensor) -> list[Tensor]:
        """The parts as views of ``packed`` int32."""
        return list(packed.split(self.sizes))


@dataclass(frozen=True)
class PaddedItem:
    """A batch on the device: ``nodes [M]``, ``x [M, F]``, and ``(indptr, indices)`` per hop, seeds outwards."""

    layout: PaddedLayout
    nodes: Tensor
    x: Tensor
    hops: tuple[tuple[Tensor, Tensor], ...]
    epoch: int
    batch: int

    def tensors(self) -> list[Tensor]:
        """Every array."""
        return [self.nodes, self.x, *(tensor for hop in self.hops for tensor in hop)]

    @classmethod
    def unpacked(cls, layout: PaddedLayout, packed: Tensor, x: Tensor, epoch: int, batch: int) -> PaddedItem:
        """Out of a packed structure."""
        nodes, *rest = layout.parts(packed)
        return cls(layout, nodes, x, tuple(zip(rest[::2], rest[1::2], strict=True)), epoch, batch)


@dataclass(frozen=True)
class PackedItem:
    """A batch in host memory: the packed structure, and its features in the first ``count`` of ``rows [M, F]``."""

    layout: PaddedLayout
    packed: Tensor
    rows: Tensor
    count: int
    epoch: int
    batch: int

    @property
    def x(self) -> Tensor:
        """Features of the nodes that exist."""
        return self.rows[: self.count]

    def tensors(self) -> list[Tensor]:
        """What is copied."""
        return [self.packed, self.x]


def pack(batch: MiniBatch, layout: PaddedLayout, packed: Tensor) -> None:
    """The structure of a batch into ``packed`` int32; rows that do not exist are empty, the rest is not written."""
    nodes, *rest = layout.parts(packed)
    nodes[: batch.input_nodes.numel()] = batch.input_nodes
    for block, indptr, indices in zip(reversed(batch.blocks), rest[::2], rest[1::2], strict=True):
        indptr[: block.num_dst + 1] = block.indptr
        indptr[block.num_dst + 1 :] = block.num_edges
        indices[: block.num_edges] = block.indices


class PaddedHost(HostSide):
    """Compiled sampling and gathering on the CPU into pinned buffers, at most ``slots`` of them; ``x`` on the host."""

    def __init__(self, sampler: NeighbourSampler, x: Tensor, device: torch.device, slots: int) -> None:
        self._sampler, self._x, self._device = sampler, x, device
        self.slots = PinnedSlots(slots)
        self._pins = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pins else None
        self._idle: list[tuple[Tensor, Tensor]] = []
        self._largest = 0  # nodes of a batch so far
        self._lock = threading.Lock()

    def prepare(self, seeds: SeedBatch) -> PackedItem:
        """Sample, pack and gather, in the calling thread alone."""
        self.slots.take()
        count = seeds.seeds.numel()
        layout = PaddedLayout.of(count, self._sampler.fanouts, self._sampler.graph.num_nodes)
        batch = self._sampler.sample(seeds.seeds.cpu(), seeds.epoch, seeds.batch)
        nodes = batch.input_nodes.numel()
        packed, rows = self._buffers(layout, nodes)
        pack(batch, layout, packed)
        gather_rows_cpu(self._x, batch.input_nodes, rows[:nodes], shares=1)
        return PackedItem(layout, packed, rows, nodes, seeds.epoch, seeds.batch)

    def _buffers(self, layout: PaddedLayout, nodes: int) -> tuple[Tensor, Tensor]:
        """Pinned buffers that no batch holds; pinning takes long, so they are kept. ``nodes``: rows that are needed."""
        size = sum(layout.sizes)
        with self._lock:
            self._largest = max(self._largest, nodes)
            for place, (packed, x) in enumerate(self._idle):
                if packed.numel() == size and x.shape[0] >= nodes:
                    return self._idle.pop(place)
            self._idle = [one for one in self._idle if one[1].shape[0] >= nodes or one[0].numel() != size]
            rows = min(int(self._largest * SPARE_ROWS), layout.nodes)
        packed = torch.empty(size, dtype=torch.int32, pin_memory=self._pins)
        return packed, torch.empty(rows, self._x.shape[1], dtype=self._x.dtype, pin_memory=self._pins)

    def transfer(self, item: PackedItem) -> PaddedItem | OnDevice:
        """Two copies; returns when they have arrived."""
        if self._stream is None:
            return self._copied(item)
        with torch.cuda.stream(self._stream):
            moved, ready = self._copied(item), torch.cuda.Event()
            ready.record()
        ready.synchronize()
        return OnDevice(moved, ready)

    def _copied(self, item: PackedItem) -> PaddedItem:
        packed = torch.empty_like(item.packed, device=self._device).copy_(item.packed, non_blocking=True)
        x = torch.empty(item.layout.nodes, item.rows.shape[1], dtype=item.rows.dtype, device=self._device)
        x[: item.count].copy_(item.x, non_blocking=True)
        x[item.count :].zero_()  # never read, but a weight gradient multiplies them by zeros
        return PaddedItem.unpacked(item.layout, packed, x, item.epoch, item.batch)

    def discard(self, item: PackedItem) -> None:
        """Its buffers may be used again."""
        with self._lock:
            self._idle.append((item.packed, item.rows))
        self.slots.give_back()


class PaddedDevice(DeviceSide):
    """The GPU samples and gathers by itself on a stream of its own; nothing but the end of the work is read back."""

    def __init__(self, sampler: NeighbourSampler, store: FeatureStore) -> None:
        self._sampler, self._store = sampler, store
        self._stream = torch.cuda.Stream(sampler.device)
        self._stream.wait_stream(torch.cuda.current_stream(sampler.device))

    def batch(self, seeds: SeedBatch) -> tuple[SeedBatch, list[DeviceHop]]:
        """Sample."""
        device = self._sampler.device
        with torch.cuda.stream(self._stream):
            ids = seeds.seeds.to(device, torch.int32, non_blocking=True)
            clock = make_clock(self._sampler.seed, seeds.epoch, seeds.batch).to(device, non_blocking=True)
            hops = self._sampler.sample_padded(ids, clock)
            self._finish()
        return seeds, hops

    def read(self, item: tuple[SeedBatch, list[DeviceHop]]) -> OnDevice:
        """Features of all nodes."""
        seeds, hops = item
        with torch.cuda.stream(self._stream):
            found = padded_item(seeds, hops, self._sampler, self._store)
            ready = self._finish()
        return OnDevice(found, ready)

    def _finish(self) -> torch.cuda.Event:
        ready = torch.cuda.Event()
        ready.record(self._stream)
        ready.synchronize()
        return ready


def padded_item(seeds: SeedBatch, hops: list[DeviceHop], sampler: NeighbourSampler, store: FeatureStore) -> PaddedItem:
    """The batch that the GPU's sampler has made, with features that the GPU reads by itself."""
    last = hops[-1]
    layout = PaddedLayout.of(seeds.seeds.numel(), sampler.fanouts, sampler.graph.num_nodes)
    rows = torch.zeros(last.nodes.numel(), store.x.shape[1], dtype=store.x.dtype, device=last.nodes.device)
    rows = store.read_padded(last.nodes, last.num_nodes, rows, beside=True)
    pairs = tuple((hop.indptr, hop.indices) for hop in hops)
    return PaddedItem(layout, last.nodes, rows, pairs, seeds.epoch, seeds.batch)
