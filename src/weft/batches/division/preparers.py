"""What prepares batches: a host and a device, each with batches of their exact or of a padded size, and their clocks.

Hardware takes part by implementing :class:`Hardware`; :class:`Gpu` is what Weft has, ``examples/thread_accelerator.py``
another one. A ``profile_key`` distinguishes hardware of the same name, so that measured phases are not mixed up.

Shapes: S seeds, N nodes, M node capacity, R rows that no cache has, F features, h hops, seeds outwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.batches.block import MiniBatch, Subgraph
from weft.batches.features import FeatureStore
from weft.batches.pipeline import OnDevice
from weft.batches.sampler import NeighbourSampler, SeedBatch
from weft.core.division import Registry, built_in
from weft.core.errors import TrainingError
from weft.core.host_memory import advise_huge_pages
from weft.graph.graph import Graph
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sampling.compact_triton import DeviceHop
from weft.ops.sampling.gather_rows import absent_cpu, gather_rows_cpu
from weft.ops.sampling.reference import make_clock


class HostPreparer(Protocol):
    """Prepares batches in host memory, several threads at once, and copies them to the trainer."""

    def prepare(self, seeds: SeedBatch) -> Any:
        """A batch in host memory with its features; called by any worker."""

    def transfer(self, item: Any) -> Any:
        """The same batch where it is trained, once it has arrived; called by one thread at a time."""

    def discard(self, item: Any) -> None:
        """Release the host memory of ``item``: it was transferred, or will not be trained on."""


class DevicePreparer(Protocol):
    """Prepares batches on the trainer, in the thread that trains."""

    def batch(self, seeds: SeedBatch) -> Any:
        """Sample: the structure of a batch."""

    def read(self, item: Any) -> Any:
        """The batch with its features."""


class Clock(Protocol):
    """Marks in the work of the trainer; ``lags``: it may lag behind the thread that submits it."""

    lags: bool

    def mark(self) -> Any:
        """A mark behind all work submitted so far."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Wait until the work in front of both marks is done; the seconds between them."""


class HostClock:
    """Work that is done when its call returns."""

    lags = False

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Their difference."""
        return end - begin


class CudaClock:
    """Events on the current stream of a GPU."""

    lags = True

    def mark(self) -> torch.cuda.Event:
        """An event recorded now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """By the GPU's clock; other threads run while this one waits."""
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


@dataclass(frozen=True)
class Parts:
    """What batches are made of: a graph, and a sampler and a store that make them where they are trained.

    ``slots``: prepared batches that may be in host memory at once. ``padded``: all batches have one size, for captured
    steps.
    """

    graph: Graph
    sampler: NeighbourSampler
    store: FeatureStore
    degrees: str
    slots: int
    padded: bool = False

    def host_sampler(self) -> NeighbourSampler:
        """The same batches, sampled on the CPU; a copy of edges is in huge pages, which random reads are faster in."""
        graph, sampler = self.graph, self.sampler
        if graph.adj.device.type != "cpu":
            graph = graph.to("cpu")
            adj, arrays = graph.adj, []
            for values in (adj.indptr, adj.indices):
                copy = torch.empty(values.shape, dtype=values.dtype)
                advise_huge_pages(copy.data_ptr(), copy.numel() * copy.element_size())
                arrays.append(copy.copy_(values))
            graph = graph._changed(adj=Adjacency(*arrays, adj.num_cols, weight=adj.weight, symmetric=adj.symmetric))
        return NeighbourSampler(
            graph,
            sampler.fanouts,
            device="cpu",
            degrees="sampled" if self.padded else self.degrees,  # padded batches look degrees up on the device
            subgraph=sampler.subgraph,
            seed=sampler.seed,
            edge_attr=sampler.edge_attr,
        )


@dataclass(frozen=True)
class Preparers:
    """The host's and the device's preparer, None if there is none, and the clock of the trainer."""

    host: HostPreparer | None
    device: DevicePreparer | None
    clock: Clock


class Hardware(Protocol):
    """What trains and prepares batches."""

    name: str

    def registry(self) -> Registry:
        """Its operators and Weft's own."""

    def preparers(self, parts: Parts) -> Preparers:
        """Its operators on ``parts``."""


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU and the CPUs of its host."""

    name: str = "gpu"

    def registry(self) -> Registry:
        """Weft's own."""
        return built_in()

    def preparers(self, parts: Parts) -> Preparers:
        """The host reads graph and features in its memory, or copies of its own."""
        store, sampler, slots = parts.store, parts.sampler, parts.slots
        clock = CudaClock() if store.device.type == "cuda" else HostClock()
        if parts.padded:
            host = PaddedHost(parts.host_sampler(), store.x.cpu(), store.device, slots, store)
            return Preparers(host, PaddedDevice(sampler, store), clock)
        host = ExactHost(parts.host_sampler(), store.x.cpu(), store.device, slots)
        return Preparers(host, ExactDevice(sampler, store), clock)


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


class CpuHost(HostPreparer):
    """Compiled sampling and gathering on the CPU; features ``x [N, F]`` in host memory, batches pinned for a GPU.

    At most ``slots`` batches are in host memory at once.
    """

    def __init__(self, sampler: NeighbourSampler, x: Tensor, device: torch.device, slots: int) -> None:
        self._sampler, self._x, self._device = sampler, x, device
        self.slots = PinnedSlots(slots)
        self._pins = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pins else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # a cache may still be filled

    def _copied(self, item: Any) -> Any:
        """``item`` where it is trained."""
        raise NotImplementedError

    def transfer(self, item: Any) -> Any:
        """Copy to the device; returns when it has arrived."""
        if self._stream is None:
            return self._copied(item)
        with torch.cuda.stream(self._stream):
            moved, ready = self._copied(item), torch.cuda.Event()
            ready.record()
        ready.synchronize()
        return OnDevice(moved, ready)

    def discard(self, item: Any) -> None:
        """One batch less in host memory."""
        self.slots.give_back()


# ---- Batches of their exact size.


class ExactHost(CpuHost):
    """Batches in memory of their own."""

    def prepare(self, seeds: SeedBatch) -> MiniBatch | Subgraph:
        """Sample and gather, in the calling thread alone."""
        self.slots.take()
        batch = self._sampler.sample(seeds.seeds.cpu(), seeds.epoch, seeds.batch)
        nodes = batch.input_nodes
        rows = torch.empty(nodes.numel(), self._x.shape[1], dtype=self._x.dtype, pin_memory=self._pins)
        return batch.with_data(gather_rows_cpu(self._x, nodes, rows, shares=1))

    def _copied(self, item: MiniBatch | Subgraph) -> MiniBatch | Subgraph:
        """On a CPU the batch gets memory of its own, as it would on a device."""
        if self._pins:
            return item.to(self._device, non_blocking=True)
        return item.with_data(None if item.x is None else item.x.clone())


class ExactDevice(DevicePreparer):
    """The trainer samples and reads features itself."""

    def __init__(self, sampler: NeighbourSampler, store: FeatureStore) -> None:
        self._sampler, self._store = sampler, store

    def batch(self, seeds: SeedBatch) -> MiniBatch | Subgraph:
        """Sample."""
        return self._sampler.sample(seeds.seeds, seeds.epoch, seeds.batch)

    def read(self, item: MiniBatch | Subgraph) -> MiniBatch | Subgraph:
        """Features of the input nodes."""
        return item.with_data(self._store.read(item.input_nodes))


# ---- Batches padded to one size per number of seeds, so that a GPU can capture the training step.
#
# The host packs the structure of a batch into one pinned buffer in the layout that the GPU's own sampler gives, so a
# transfer is two copies. Rows that a cache on the GPU has are neither gathered nor copied: the batch says where the
# other rows belong. Both sides give equal arrays, and rows beyond the existing ones are zeros.

SPARE_ROWS = 1.1  # rows of a pinned buffer beyond the largest batch so far


@dataclass(frozen=True)
class PaddedLayout:
    """Capacities of a batch of ``seeds``: ``rows[h]`` and ``edges[h]`` of hop h, ``nodes`` of all."""

    seeds: int
    rows: tuple[int, ...]
    edges: tuple[int, ...]
    nodes: int

    @classmethod
    def of(cls, seeds: int, fanouts: Sequence[int], num_nodes: int) -> PaddedLayout:
        """The most that fan-outs allow, as the GPU's sampler pads: duplicates among the seeds keep their rows."""
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


@dataclass(frozen=True)
class PaddedItem:
    """A batch on the device: ``nodes [M]``, ``x [M, F]``, and ``(indptr, indices)`` per hop."""

    layout: PaddedLayout
    nodes: Tensor
    x: Tensor
    hops: tuple[tuple[Tensor, Tensor], ...]
    epoch: int
    batch: int

    def tensors(self) -> list[Tensor]:
        """Every array."""
        return [self.nodes, self.x, *(tensor for hop in self.hops for tensor in hop)]


@dataclass(frozen=True)
class PackedItem:
    """A batch of ``count`` nodes in host memory: the packed structure, and features in the first of ``rows [M, F]``.

    ``positions [R]`` int32: the nodes that these rows are of, if a cache has the others; None: they are of all nodes.
    ``room``: the buffer that the structure is the beginning of.
    """

    layout: PaddedLayout
    room: Tensor
    rows: Tensor
    count: int
    epoch: int
    batch: int
    positions: Tensor | None = None

    @property
    def packed(self) -> Tensor:
        """The structure."""
        return self.room[: sum(self.layout.sizes)]

    @property
    def x(self) -> Tensor:
        """Features of the nodes that exist and that no cache has."""
        return self.rows[: self.count if self.positions is None else self.positions.numel()]

    def tensors(self) -> list[Tensor]:
        """What is copied."""
        return [self.packed, self.x] + ([] if self.positions is None else [self.positions])


class PaddedHost(CpuHost):
    """Batches in pinned buffers that are used again; rows that a cache of ``store`` on the device has stay there."""

    def __init__(
        self,
        sampler: NeighbourSampler,
        x: Tensor,
        device: torch.device,
        slots: int,
        store: FeatureStore | None = None,
    ) -> None:
        super().__init__(sampler, x, device, slots)
        self._store, self._cached = store, None if store is None else store.held()
        self._idle: list[tuple[Tensor, Tensor]] = []
        self._largest = 0  # nodes of a batch so far
        self._lock = threading.Lock()

    def prepare(self, seeds: SeedBatch) -> PackedItem:
        """Sample, pack and gather, in the calling thread alone."""
        self.slots.take()
        layout = PaddedLayout.of(seeds.seeds.numel(), self._sampler.fanouts, self._sampler.graph.num_nodes)
        batch = self._sampler.sample(seeds.seeds.cpu(), seeds.epoch, seeds.batch)
        nodes = batch.input_nodes
        absent, positions = nodes, None  # the nodes whose rows no cache has, and where they are among all
        if self._cached is not None and self._store is not None:
            positions = torch.empty_like(nodes)
            absent = absent_cpu(nodes, self._cached, positions)
            self._store.note_reads(nodes.numel(), nodes.numel() - absent.numel())
        room, rows = self._buffers(layout, absent.numel())
        all_nodes, *arrays = room[: sum(layout.sizes)].split(layout.sizes)
        all_nodes[: nodes.numel()] = nodes
        for block, indptr, indices in zip(reversed(batch.blocks), arrays[::2], arrays[1::2], strict=True):
            indptr[: block.num_dst + 1] = block.indptr
            indptr[block.num_dst + 1 :] = block.num_edges  # rows that do not exist are empty
            indices[: block.num_edges] = block.indices
        gather_rows_cpu(self._x, absent, rows[: absent.numel()], shares=1)
        if positions is not None:  # pinned, behind the structure
            positions = room[room.numel() - nodes.numel() :][: absent.numel()].copy_(positions[: absent.numel()])
        return PackedItem(layout, room, rows, nodes.numel(), seeds.epoch, seeds.batch, positions)

    def _buffers(self, layout: PaddedLayout, nodes: int) -> tuple[Tensor, Tensor]:
        """Idle pinned buffers for ``layout`` and ``nodes`` rows, or new ones; they are reused: pinning is slow."""
        size = sum(layout.sizes) + (0 if self._cached is None else layout.nodes)
        with self._lock:
            self._largest = max(self._largest, nodes)
            for position, (packed, x) in enumerate(self._idle):
                if packed.numel() >= size and x.shape[0] >= nodes:
                    return self._idle.pop(position)
            self._idle = []  # all are too small, and with another there would be more than the plan allows
            rows = min(int(self._largest * SPARE_ROWS), layout.nodes)
        packed = torch.empty(size, dtype=torch.int32, pin_memory=self._pins)
        return packed, torch.empty(rows, self._x.shape[1], dtype=self._x.dtype, pin_memory=self._pins)

    def _copied(self, item: PackedItem) -> PaddedItem:
        """Two copies, and one of where rows belong."""
        packed = torch.empty_like(item.packed, device=self._device).copy_(item.packed, non_blocking=True)
        x = torch.empty(item.layout.nodes, item.rows.shape[1], dtype=item.rows.dtype, device=self._device)
        if item.positions is None or self._store is None:
            x[: item.count].copy_(item.x, non_blocking=True)
        else:
            far, positions = (tensor.to(self._device, non_blocking=True) for tensor in (item.x, item.positions))
            self._store.complete(packed[: item.count], far, positions, x[: item.count])
        x[item.count :].zero_()  # never read, but a weight gradient multiplies them by zeros
        nodes, *arrays = packed.split(item.layout.sizes)
        hops = tuple(zip(arrays[::2], arrays[1::2], strict=True))
        return PaddedItem(item.layout, nodes, x, hops, item.epoch, item.batch)

    def discard(self, item: PackedItem) -> None:
        """Its buffers may be used again."""
        with self._lock:
            self._idle.append((item.room, item.rows))
        super().discard(item)


class PaddedDevice(DevicePreparer):
    """The GPU samples and gathers by itself on a stream of its own; only the end of the work is read back."""

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
            self._finished()
        return seeds, hops

    def read(self, item: tuple[SeedBatch, list[DeviceHop]]) -> OnDevice:
        """Features of all nodes."""
        seeds, hops = item
        layout = PaddedLayout.of(seeds.seeds.numel(), self._sampler.fanouts, self._sampler.graph.num_nodes)
        with torch.cuda.stream(self._stream):
            batch = padded_item(seeds, hops, layout, self._store)
            return OnDevice(batch, self._finished())

    def _finished(self) -> torch.cuda.Event:
        ready = torch.cuda.Event()
        ready.record(self._stream)
        ready.synchronize()
        return ready


def padded_item(seeds: SeedBatch, hops: list[DeviceHop], layout: PaddedLayout, store: FeatureStore) -> PaddedItem:
    """The batch that the GPU's sampler has made, with features that the GPU reads by itself."""
    nodes = hops[-1].nodes[: layout.nodes]
    rows = torch.zeros(nodes.numel(), store.x.shape[1], dtype=store.x.dtype, device=nodes.device)
    rows = store.read_padded(nodes, hops[-1].num_nodes, rows)
    ends = zip(hops, layout.rows, layout.edges, strict=True)
    pairs = tuple((hop.indptr[: count + 1], hop.indices[:edges]) for hop, count, edges in ends)
    return PaddedItem(layout, nodes, rows, pairs, seeds.epoch, seeds.batch)
