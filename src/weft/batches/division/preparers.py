"""The two sides that prepare batches, and the clock of the trainer: what hardware implements to take part."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.batches.block import MiniBatch, Subgraph
from weft.batches.features import FeatureStore
from weft.batches.pipeline import OnDevice
from weft.batches.sampler import NeighbourSampler, SeedBatch
from weft.core.batch_sizes import bucket_sizes, largest_batch
from weft.core.division import Registry, built_in
from weft.core.errors import TrainingError
from weft.core.graph_stats import GraphStats
from weft.core.host_memory import advise_huge_pages
from weft.graph.graph import Graph
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sampling.compact_triton import DeviceHop
from weft.ops.sampling.gather_rows import absent_cpu, gather_rows_cpu
from weft.ops.sampling.reference import make_clock


class HostSide(Protocol):
    """Prepares batches in host memory, several threads at once, and carries them to the trainer."""

    def prepare(self, seeds: SeedBatch) -> Any:
        """A batch in host memory with its features; called by any worker."""

    def transfer(self, item: Any) -> Any:
        """The same batch where it is trained, once it has arrived; called by one thread at a time."""

    def discard(self, item: Any) -> None:
        """Give the host memory of ``item`` back: it was transferred, or nobody is going to train on it."""


class DeviceSide(Protocol):
    """Prepares batches on the trainer, in the thread that trains.

    Where a division prepares beside training, another thread calls it, and calls return when their work is done.
    """

    def batch(self, seeds: SeedBatch) -> Any:
        """Sample: the structure of a batch."""

    def read(self, item: Any) -> Any:
        """The batch with its features."""


class DeviceClock(Protocol):
    """Marks in the work of the trainer; ``lags``: it may lag behind the thread that submits it."""

    lags: bool

    def mark(self) -> Any:
        """A mark behind all work submitted so far."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks, once both are reached."""

    def wait(self, mark: Any) -> None:
        """Wait until the work in front of ``mark`` is done."""


class HostClock:
    """Work that is done when its call returns."""

    lags = False

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Their difference."""
        return end - begin

    def wait(self, mark: float) -> None:
        """Nothing to wait for."""


class CudaClock:
    """Events on the current stream of a GPU."""

    lags = True

    def mark(self) -> torch.cuda.Event:
        """An event recorded now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """By the GPU's clock."""
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def wait(self, mark: torch.cuda.Event) -> None:
        """Until the event has happened; other threads run meanwhile."""
        mark.synchronize()


def clock_of(device: torch.device) -> DeviceClock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


# ---- The two sides with batches of their exact size: sampled and gathered on a CPU, or by a GPU out of pinned memory.
#
# The host's batches lie in pinned memory where a GPU trains, at most as many at once as the division allows.

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


# ---- Sizes that batches are padded to: a layout per number of seeds and bucket, and the smallest that a batch fits
# into.
#
# Shapes: h hops, seeds outwards.


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


# ---- The two sides with batches padded to one of few sizes on a GPU, so that the training step can be captured.
#
# The host packs the structure of a batch into one pinned buffer in the layout that the GPU's own sampler gives, so a
# transfer is two copies. Rows that a cache on the GPU has are neither gathered nor copied: the batch says where others
# belong. Whoever prepares a batch, the arrays that exist are equal, and rows beyond them are zeros.
#
# Shapes: S seeds, N nodes, M node capacity, R rows that no cache has, F features.

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


# ---- Hardware: operators of the registry, and the sides that carry them out for a graph.
#
# ``Gpu`` is what Weft has. Other hardware is any object with ``name``, ``registry()`` and ``sides(parts)``, such as a
# :class:`weft.batches.division.thread_accelerator.ThreadAccelerator`. A ``profile_key`` tells it from other hardware
# of the
# same name, so that what was measured of one is not taken for the other.


@dataclass(frozen=True)
class Parts:
    """What batches are made of: a graph, and a sampler and a store that make them where they are trained.

    ``slots``: prepared batches that may be in host memory at once. ``padded``: batches of ``buckets`` sizes, for
    captured steps.
    """

    graph: Graph
    sampler: NeighbourSampler
    store: FeatureStore
    degrees: str
    slots: int
    padded: bool = False
    buckets: int = 1

    def host_sampler(self) -> NeighbourSampler:
        """The same batches, sampled on the CPU."""
        graph = self.graph if self.graph.adj.device.type == "cpu" else _edges_in_huge_pages(self.graph.to("cpu"))
        degrees = "sampled" if self.padded else self.degrees  # padded batches look degrees up on the device
        about = {"degrees": degrees, "subgraph": self.sampler.subgraph, "seed": self.sampler.seed}
        about["edge_attr"] = self.sampler.edge_attr
        return NeighbourSampler(graph, self.sampler.fanouts, device="cpu", **about)

    def host_features(self) -> Tensor:
        """Features in host memory."""
        x = self.store.x
        return x if x.device.type == "cpu" else x.cpu()


@dataclass(frozen=True)
class Sides:
    """Who prepares batches, and the clock of the trainer."""

    host: HostSide | None
    device: DeviceSide | None
    clock: DeviceClock


class Hardware(Protocol):
    """What trains and prepares batches."""

    name: str

    def registry(self) -> Registry:
        """Its operators beside Weft's own."""

    def sides(self, parts: Parts) -> Sides:
        """Its operators on ``parts``."""


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU and the CPUs of its host; padded batches are prepared beside training."""

    padded: bool = True
    name: str = "gpu"

    def registry(self) -> Registry:
        """Weft's own."""
        return built_in(beside=self.padded)

    def sides(self, parts: Parts) -> Sides:
        """The host reads graph and features where they lie in its memory, or copies of its own."""
        device, clock = parts.store.device, clock_of(parts.store.device)
        about = (parts.host_sampler(), parts.host_features(), device, parts.slots)
        if not parts.padded:
            return Sides(ExactHost(*about), ExactDevice(parts.sampler, parts.store), clock)
        layouts = layouts_of(parts.sampler, parts.buckets)
        host = PaddedHost(*about, layouts, parts.store)
        return Sides(host, PaddedDevice(parts.sampler, parts.store, layouts), clock)


def exact_sides(parts: Parts) -> tuple[ExactHost, ExactDevice]:
    """Both sides on the CPU, for hardware that a thread stands in for."""
    cpu = torch.device("cpu")
    host = ExactHost(parts.host_sampler(), parts.host_features(), cpu, parts.slots)
    return host, ExactDevice(parts.sampler, parts.store)


def _edges_in_huge_pages(graph: Graph) -> Graph:
    """The same with its edges in memory that is read faster in random places."""
    adj = graph.adj
    indptr, indices = (_in_huge_pages(one) for one in (adj.indptr, adj.indices))
    return graph._changed(adj=Adjacency(indptr, indices, adj.num_cols, weight=adj.weight, symmetric=adj.symmetric))


def _in_huge_pages(values: Tensor) -> Tensor:
    copy = torch.empty(values.shape, dtype=values.dtype)
    advise_huge_pages(copy.data_ptr(), copy.numel() * copy.element_size())
    return copy.copy_(values)
