"""The two sides with batches padded to one of few sizes on a GPU, so that the training step can be captured.

The host packs the structure of a batch into one pinned buffer in the layout that the GPU's own sampler gives, so a
transfer is two copies. Rows that a cache on the GPU has are neither gathered nor copied: the batch says where others
belong. Whoever prepares a batch, the arrays that exist are equal, and rows beyond them are zeros.

Shapes: S seeds, N nodes, M node capacity, R rows that no cache has, F features.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.flow.division.exact_batches import PinnedSlots
from weft.flow.division.layouts import Layouts, PaddedLayout
from weft.flow.division.sides import DeviceSide, HostSide
from weft.flow.features.feature_store import FeatureStore
from weft.flow.sampling.batch import MiniBatch
from weft.flow.sampling.sampler import NeighbourSampler
from weft.flow.sampling.seeds import SeedBatch
from weft.flow.stages.streams import OnDevice
from weft.ops.sampling.compact_triton import DeviceHop
from weft.ops.sampling.draws import make_clock
from weft.ops.sampling.gather_rows import absent_cpu, gather_rows_cpu

SPARE_ROWS = 1.1  # rows of a pinned buffer beyond the largest batch so far


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
    """A batch of ``count`` nodes in host memory: the packed structure, and features in the first of ``rows [M, F]``.

    ``places [R]`` int32: the nodes that these rows are of, where a cache has the others; None: they are of all nodes.
    ``room``: the buffer that the structure is the beginning of.
    """

    layout: PaddedLayout
    packed: Tensor
    rows: Tensor
    count: int
    epoch: int
    batch: int
    room: Tensor
    places: Tensor | None = None

    @property
    def x(self) -> Tensor:
        """Features of the nodes that exist and that no cache has."""
        return self.rows[: self.count if self.places is None else self.places.numel()]

    def tensors(self) -> list[Tensor]:
        """What is copied."""
        return [self.packed, self.x] + ([] if self.places is None else [self.places])


def pack(batch: MiniBatch, layout: PaddedLayout, packed: Tensor) -> None:
    """The structure of a batch into ``packed`` int32; rows that do not exist are empty, the rest is not written."""
    nodes, *rest = layout.parts(packed)
    nodes[: batch.input_nodes.numel()] = batch.input_nodes
    for block, indptr, indices in zip(reversed(batch.blocks), rest[::2], rest[1::2], strict=True):
        indptr[: block.num_dst + 1] = block.indptr
        indptr[block.num_dst + 1 :] = block.num_edges
        indices[: block.num_edges] = block.indices


class PaddedHost(HostSide):
    """Compiled sampling and gathering on the CPU into pinned buffers, at most ``slots`` of them; ``x`` on the host.

    ``store``: rows that its cache on the device has are taken from there.
    """

    def __init__(
        self,
        sampler: NeighbourSampler,
        x: Tensor,
        device: torch.device,
        slots: int,
        layouts: Layouts | None = None,
        store: FeatureStore | None = None,
    ) -> None:
        self._sampler, self._x, self._device, self._store = sampler, x, device, store
        self._held = None if store is None else store.held()
        self._layouts = layouts or layouts_of(sampler)
        self.slots = PinnedSlots(slots)
        self._pins = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pins else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # a cache may still be filled
        self._idle: list[tuple[Tensor, Tensor]] = []
        self._largest = 0  # nodes of a batch so far
        self._lock = threading.Lock()

    def prepare(self, seeds: SeedBatch) -> PackedItem:
        """Sample, pack and gather, in the calling thread alone."""
        self.slots.take()
        count = seeds.seeds.numel()
        batch = self._sampler.sample(seeds.seeds.cpu(), seeds.epoch, seeds.batch)
        nodes, hops = batch.input_nodes.numel(), batch.blocks[::-1]
        layout = self._layouts.fitting(count, [hop.num_dst for hop in hops], [hop.num_edges for hop in hops], nodes)
        wanted, places = self._absent(batch.input_nodes)
        room, rows = self._buffers(self._layouts.largest(count), wanted.numel())
        packed = room[: sum(layout.sizes)]
        pack(batch, layout, packed)
        gather_rows_cpu(self._x, wanted, rows[: wanted.numel()], shares=1)
        if places is not None:
            places = room[room.numel() - nodes :][: places.numel()].copy_(places)  # pinned, behind the structure
        return PackedItem(layout, packed, rows, nodes, seeds.epoch, seeds.batch, room, places)

    def _absent(self, nodes: Tensor) -> tuple[Tensor, Tensor | None]:
        """The nodes whose rows no cache has, and where they are among ``nodes``; None: all of them."""
        if self._held is None or self._store is None:
            return nodes, None
        places = torch.empty_like(nodes)
        wanted = absent_cpu(nodes, self._held, places)
        self._store.note_reads(nodes.numel(), nodes.numel() - wanted.numel())
        return wanted, places[: wanted.numel()]

    def _buffers(self, layout: PaddedLayout, nodes: int) -> tuple[Tensor, Tensor]:
        """Pinned buffers for ``layout`` that no batch holds, kept, since pinning takes long; ``nodes``: rows needed."""
        size = sum(layout.sizes) + (0 if self._held is None else layout.nodes)
        with self._lock:
            self._largest = max(self._largest, nodes)
            for place, (packed, x) in enumerate(self._idle):
                if packed.numel() >= size and x.shape[0] >= nodes:
                    return self._idle.pop(place)
            self._idle = []  # all are too small, and with another there would be more than the plan allows
            rows = min(int(self._largest * SPARE_ROWS), layout.nodes)
        packed = torch.empty(size, dtype=torch.int32, pin_memory=self._pins)
        return packed, torch.empty(rows, self._x.shape[1], dtype=self._x.dtype, pin_memory=self._pins)

    def transfer(self, item: PackedItem) -> PaddedItem | OnDevice:
        """Two copies, and one of where rows belong; returns when they have arrived."""
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
        if item.places is None or self._store is None:
            x[: item.count].copy_(item.x, non_blocking=True)
        else:
            far, places = (one.to(self._device, non_blocking=True) for one in (item.x, item.places))
            self._store.complete(packed[: item.count], far, places, x[: item.count])
        x[item.count :].zero_()  # never read, but a weight gradient multiplies them by zeros
        return PaddedItem.unpacked(item.layout, packed, x, item.epoch, item.batch)

    def discard(self, item: PackedItem) -> None:
        """Its buffers may be used again."""
        with self._lock:
            self._idle.append((item.room, item.rows))
        self.slots.give_back()


def layouts_of(sampler: NeighbourSampler, buckets: int = 1) -> Layouts:
    """Of the batches of ``sampler``."""
    stats = sampler.graph.stats() if buckets > 1 else None
    return Layouts(tuple(sampler.fanouts), sampler.graph.num_nodes, buckets, stats)


@dataclass(frozen=True)
class SampledItem:
    """A batch that the GPU has sampled, and the layout that it fits into."""

    seeds: SeedBatch
    hops: list[DeviceHop]
    layout: PaddedLayout


class PaddedDevice(DeviceSide):
    """The GPU samples and gathers by itself on a stream of its own.

    Nothing but the end of the work is read back, and with batches of several sizes how large the sampled one is.
    """

    def __init__(self, sampler: NeighbourSampler, store: FeatureStore, layouts: Layouts | None = None) -> None:
        self._sampler, self._store = sampler, store
        self._layouts = layouts or layouts_of(sampler)
        self._stream = torch.cuda.Stream(sampler.device)
        self._stream.wait_stream(torch.cuda.current_stream(sampler.device))

    def batch(self, seeds: SeedBatch) -> SampledItem:
        """Sample."""
        device = self._sampler.device
        with torch.cuda.stream(self._stream):
            ids = seeds.seeds.to(device, torch.int32, non_blocking=True)
            clock = make_clock(self._sampler.seed, seeds.epoch, seeds.batch).to(device, non_blocking=True)
            hops = self._sampler.sample_padded(ids, clock)
            layout = layout_of(hops, seeds.seeds.numel(), self._layouts)
            self._finish()
        return SampledItem(seeds, hops, layout)

    def read(self, item: SampledItem) -> OnDevice:
        """Features of all nodes."""
        with torch.cuda.stream(self._stream):
            found = padded_item(item.seeds, item.hops, item.layout, self._store)
            ready = self._finish()
        return OnDevice(found, ready)

    def _finish(self) -> torch.cuda.Event:
        ready = torch.cuda.Event()
        ready.record(self._stream)
        ready.synchronize()
        return ready


def layout_of(hops: list[DeviceHop], seeds: int, layouts: Layouts) -> PaddedLayout:
    """The layout of a batch that the GPU's sampler has made; with several sizes, its own are read back."""
    if layouts.buckets == 1:
        return layouts.largest(seeds)
    sizes = torch.cat([hop.num_nodes.view(1).long() for hop in hops] + [hop.indptr[-1:].long() for hop in hops])
    numbers = sizes.tolist()
    nodes, edges = numbers[: len(hops)], numbers[len(hops) :]
    return layouts.fitting(seeds, [seeds, *nodes[:-1]], edges, nodes[-1])


def padded_item(seeds: SeedBatch, hops: list[DeviceHop], layout: PaddedLayout, store: FeatureStore) -> PaddedItem:
    """The batch that the GPU's sampler has made in ``layout``, with features that the GPU reads by itself."""
    last = hops[-1]
    nodes = last.nodes[: layout.nodes]
    rows = torch.zeros(nodes.numel(), store.x.shape[1], dtype=store.x.dtype, device=nodes.device)
    rows = store.read_padded(nodes, last.num_nodes, rows, beside=True)
    ends = zip(hops, layout.rows, layout.edges, strict=True)
    pairs = tuple((hop.indptr[: count + 1], hop.indices[:edges]) for hop, count, edges in ends)
    return PaddedItem(layout, nodes, rows, pairs, seeds.epoch, seeds.batch)
