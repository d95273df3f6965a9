"""Sampled: batches of sampled neighbourhoods, made by overlapping stages or on the GPU, and exact evaluation.

Shapes: N nodes, S seeds of a batch, M nodes of a batch, T members, H features of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.batches.block import MiniBatch, PaddedAdjacency, Subgraph, exact_device, local_adjacency
from weft.batches.cache import CacheChoice, Presampled, choose_cache, policy_called
from weft.batches.features import FeatureStore
from weft.batches.layerwise import LayerWise
from weft.batches.pipeline import Pipeline, training_stages
from weft.batches.sampler import NeighbourSampler, SeedBatch, SeedOrder, is_plain, resolved
from weft.batches.source import SPLITS, Batch, FullGraph, Infer, MakeSource, SourceRequest
from weft.core.errors import SpecError
from weft.core.placement import EVALUATION_EDGES, DataPlacement
from weft.core.plan import Plan
from weft.core.settings import Hop, most_picks
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency
from weft.ops.reduce import ONE_RANK
from weft.ops.sampling.compact_triton import DeviceHop
from weft.ops.sampling.gather_rows import clear_rows_triton
from weft.ops.sampling.reference import epoch_clocks

# ---- DeviceBatch: seeds and a clock, from which the step itself samples, gathers and builds a batch on the GPU.
#
# So one CUDA graph does all of it: a replay reads ``seeds [S]`` int32 and ``clock [3]`` int64 again. Or two: one that
# fetches into buffers, one that trains on them, so that the next batch is fetched meanwhile
# (:mod:`weft.runtime.epoch`).
#
# Shapes: S seeds, M nodes of a padded batch, F features.


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


# ---- DeviceSeeds: seeds and clocks of the batches that captured steps sample themselves, made on the device.
#
# They are made once per epoch, by kernels. A copy per batch, of however few bytes, could wait in line for a batch of
# the
# host's that the bus is carrying.


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


# ---- FeatureBuffer: memory for the features of captured batches, in which rows that no node has are always zeros.
#
# Batches differ in size, so a larger one leaves rows behind. Nothing aggregates them, but attention shifts its scores
# by
# a bound over all rows: with zeros there, a step depends on its batch alone and not on what was in the buffer before.
#
# Shapes: M rows of a padded batch, F features.


class FeatureBuffer:
    """``rows`` rows as wide as those of ``x``; ``filled [1]``: rows from there on are zeros."""

    def __init__(self, rows: int, x: Tensor, device: torch.device) -> None:
        self.rows = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=device)
        self.filled = torch.zeros(1, dtype=torch.int32, device=device)

    def read(self, store: FeatureStore, nodes: Tensor, count: Tensor, beside: bool = False) -> Tensor:
        """The features ``[M, F]`` of the first ``count [1]`` of ``nodes [M]``, zeros behind them; nothing is read back.

        ``beside``: other work runs on the device at the same time.
        """
        found = store.read_padded(nodes, count, self.rows[: nodes.numel()], beside=beside)
        clear_rows_triton(found, count, self.filled)
        return found


MOST_DENSE = 1 << 34  # values of sparse features that are made dense for batches
WHOLE_BYTES = 1 << 32  # features up to which a graph on the device is evaluated as a whole, where no plan says
EDGES_AT_ONCE = 1 << 26  # of a pass over all edges


@dataclass(frozen=True)
class Sampling:
    """How to sample: neighbours per hop from the seeds outwards, seeds per batch, and the seed of all draws.

    ``captured``: sample, gather and train as CUDA graphs where the GPU reaches everything.
    ``depth``: finished batches that wait per stage, 1 for none at all (synchronous). ``workers``: threads that sample
    on a CPU. ``device``: where batches are trained on (None: as requested). ``placement``: what a plan says of where
    things lie, and ``policy`` a cache policy of the user's own.
    """

    fanout: tuple[Hop, ...]
    batch: int
    seed: int = 0
    depth: int = 2
    workers: int = 1
    captured: bool = True
    device: torch.device | None = None
    placement: DataPlacement | None = None
    policy: Any = None

    def __call__(self, request: SourceRequest) -> Sampled:
        """The source of a stack."""
        return Sampled(request, self)


def source_for(task: Task, plan: Plan | None = None, policy: Any = None) -> MakeSource:
    """The source of batches of ``task``, and of the tasks that share its group, as ``plan`` says."""
    if not task.sampled:
        return FullGraph
    if task.traits is None and task.fanout is None:
        raise SpecError(
            f"task {task.label!r}: a model of your own needs fanout, the neighbours per hop, such as [15, 10]"
        )
    about: dict[str, Any] = {}
    if plan is not None:
        depth = max((stage.depth for stage in plan.stages), default=1)
        about = {"placement": plan.places, "depth": depth, "policy": policy}
    return Sampling(task.fanouts, task.batch, task.batch_seed, **about)


class Sampled:
    """Seeds in an order of their own per epoch; blocks per layer, or one local subgraph for a user's module."""

    constant, reduce = False, ONE_RANK

    def __init__(self, request: SourceRequest, sampling: Sampling) -> None:
        graph, x = request.graph, request.x
        self._x = x if isinstance(x, Tensor) else _dense_rows(x, graph)  # batches gather rows of it
        self._graph, self._sampling = graph, sampling
        self._fanouts = resolved(sampling.fanout, graph)
        self._apart = any(not isinstance(fanout, int) for fanout in self._fanouts)
        self._device = exact_device(sampling.device or request.device or graph.device)
        self._order = SeedOrder(graph.train, sampling.batch, sampling.seed)
        self._seeds = DeviceSeeds(self._order, sampling.seed, self._device)
        self.steps_per_epoch = len(self._order)
        self._edge_attr = request.subgraph and "edge_attr" in request.of_edges
        held = self._choose_cache(request.subgraph)
        self._sampler = self._make_sampler(request.subgraph, held.topology)
        self.store = FeatureStore(self._x, self._device, cached=held.features)
        stages = training_stages(self._sampler, self.store, None, self._device, sampling.workers)
        # A GPU that samples and gathers works ahead of the host by itself; threads of stages would only take the
        # interpreter from each other (H200, products shape: 61 ms per step with them, 16 without).
        overlaps = self._sampler.backend == "cpu" or self.store.tier == "host"
        self.pipeline = Pipeline(stages, sampling.depth if overlaps else 1)
        self._splits = {name: getattr(graph, name) for name in SPLITS}
        self._captured = sampling.captured and request.padding and not request.subgraph and self._can_capture()
        self.overlaps = self._captured and sampling.placement is not None and sampling.placement.overlap
        self._buffers: dict[int, FeatureBuffer] = {}  # features of captured batches, in fixed places
        self._layers = self._layer_wise()

    def _make_sampler(self, subgraph: bool, cached: Tensor | None = None) -> NeighbourSampler:
        degrees = "sampled" if subgraph or self._apart else "full"
        about = {"seed": self._sampling.seed, "threads": 1, "subgraph": subgraph, "degrees": degrees}
        about["edge_attr"] = self._edge_attr
        return NeighbourSampler(
            self._graph, self._fanouts, device=self._sampling_device(subgraph), cached=cached, **about
        )

    def _sampling_device(self, subgraph: bool) -> torch.device:
        """The device that samples: the one that trains, if it reaches the edges."""
        adj = self._graph.adj
        plain = is_plain(self._fanouts) and not subgraph and not self._apart
        if self._device.type == "cuda" and adj.device.type == "cpu" and not (adj.indices.is_pinned() and plain):
            return adj.device
        return self._device

    def _choose_cache(self, subgraph: bool) -> CacheChoice:
        placement = self._sampling.placement
        if placement is None or not placement.cached:
            return CacheChoice()
        batches = Presampled(partial(self._make_sampler, subgraph), self._order)
        policy = policy_called(placement.policy, self._sampling.policy, batches, placement, self._device)
        return choose_cache(placement, policy, self._graph, self._x)

    def _layer_wise(self) -> LayerWise | None:
        """Evaluation layer by layer, if the plan says so; else where the graph is not on the device as a whole."""
        placement = self._sampling.placement
        if placement is not None and placement.evaluation == "layers":
            return LayerWise(self._graph, self._x, self._device, placement.chunk_edges)
        here = self._graph.device == self._device and self._x.device == self._device
        if here and (placement is not None or self._x.numel() * self._x.element_size() <= WHOLE_BYTES):
            return None
        return LayerWise(self._graph, self._x, self._device, EVALUATION_EDGES)

    def _can_capture(self) -> bool:
        """Whether sampling and training can be CUDA graphs: the GPU reaches everything, and no self loops to find."""
        adj = self._graph.adj
        if self._device.type != "cuda" or self._sampler.device != self._device or self.store.tier == "host":
            return False
        if not is_plain(self._fanouts) or adj.weight is not None:
            return False
        return not adj.derived("has loops", lambda: _has_loops(adj, self._device))

    def reads(self) -> dict[str, float]:
        """Rows of features and neighbour lists that were read, and the shares that caches had; empty without any."""
        found: dict[str, float] = {}
        placement = self._sampling.placement
        if placement is not None and placement.features == "cached":
            counts = self.store.counts
            found |= {"rows_read": counts.hits + counts.misses, "feature_hit_rate": counts.hit_rate}
        if self._sampler.cached is not None:
            lists, hits = self._sampler.cached.read.tolist()
            found |= {"lists_read": lists, "list_hit_rate": hits / max(lists, 1)}
        return found

    def counters(self) -> list[Tensor]:
        """Where the device counts reads: what a trial run of a captured step must restore."""
        return self.store.counters + ([] if self._sampler.cached is None else [self._sampler.cached.read])

    # ---- training ------------------------------------------------------------------------------------

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` from ``first`` on; they depend on (sampling seed, epoch, batch) alone."""
        if self._captured:
            yield from (self._device_batch(epoch, batch) for batch in range(first, self.steps_per_epoch))
            return
        for sampled in self.pipeline.run(self._order.epoch(epoch, first)):
            yield self._batch(sampled)

    def example(self) -> Batch:
        """The first batch of the first epoch."""
        seeds = next(iter(self._order.epoch(0)))
        (sampled,) = Pipeline(self.pipeline.stages, 1).run([seeds])
        return self._batch(sampled)

    def _batch(self, sampled: MiniBatch | Subgraph) -> Batch:
        if isinstance(sampled, MiniBatch):
            blocks, labelled = tuple(block.adjacency() for block in sampled.blocks), sampled.seeds
        else:
            blocks, labelled = local_adjacency(sampled), sampled.nodes
        count = sampled.seeds.numel()
        rows = torch.arange(count, device=self._device)
        share = torch.full((1,), count / self._order.seeds.numel(), device=self._device)
        y = self._graph.y.index_select(0, labelled.to(self._graph.y.device).long()).to(self._device)
        return Batch(sampled.x, blocks, y, rows, share)

    def _device_batch(self, epoch: int, batch: int) -> DeviceBatch:
        ids, clock = self._seeds.of(epoch, batch)
        share = torch.full((1,), ids.numel() / self._order.seeds.numel(), device=self._device)
        rows, none = torch.arange(ids.numel(), device=self._device), self._graph.y[:0]
        about = {"shape": ("sampled", ids.numel()), "varies": ("seeds", "clock", "share")}
        made = {"seeds": ids, "clock": clock, "fetch": self._fetch, "build": self._build}
        return DeviceBatch(self._x[:0], self._graph.adj, none, rows, share, **about, **made)

    def _fetch(self, batch: DeviceBatch, place: int) -> Fetched:
        """Sample and gather; nothing of it is read back by the host."""
        assert batch.seeds is not None
        assert batch.clock is not None
        hops = self._sampler.sample_padded(batch.seeds, batch.clock)
        last = hops[-1]
        x = self._buffer(place).read(self.store, last.nodes, last.num_nodes, beside=self.overlaps)
        return Fetched(tuple(hops), x, self._graph.y.index_select(0, batch.seeds.long()))

    def _buffer(self, place: int) -> FeatureBuffer:
        """Memory for the features of the largest batch, which CUDA graphs keep the address of."""
        if place not in self._buffers:
            rows = seeds = min(self._order.batch_size, self._order.seeds.numel())
            for fanout in self._fanouts:
                rows = min(rows * (most_picks(fanout) + 1), seeds + self._graph.num_nodes)
            self._buffers[place] = FeatureBuffer(rows, self._x, self._device)
        return self._buffers[place]

    def _build(self, batch: DeviceBatch, fetched: Fetched) -> Batch:
        blocks = tuple(self._padded(hop) for hop in reversed(fetched.hops))
        return Batch(fetched.x, blocks, fetched.y, batch.rows, batch.share)

    def _padded(self, hop: DeviceHop) -> Adjacency:
        def full() -> tuple[Tensor, Tensor]:
            nodes = hop.nodes.clamp(0, self._graph.num_nodes - 1).long()  # beyond the existing ones they hold anything
            scale, degree = self._sampler.full_degrees
            return scale.index_select(0, nodes), degree.index_select(0, nodes[: hop.indptr.numel() - 1])

        block = PaddedAdjacency(hop.indptr, hop.indices, hop.nodes.numel(), full=None if self._apart else full)
        relation = self._sampler.relation_at(hop.edges)
        return block if relation is None else block.related(relation, self._graph.num_relations)

    # ---- evaluation ----------------------------------------------------------------------------------

    def logits(self, infer: Infer, layers: int | None) -> Tensor:
        """Exact logits ``[T, K, C]``: full neighbourhoods, nothing sampled; of all nodes, or of those of the splits."""
        if self._layers is None:
            return infer(self._whole())
        if layers is not None:
            return self._layers.logits(infer, layers)
        return infer(self._whole()).index_select(-2, self._layers.results.ids.long().to(self._device))

    def _whole(self) -> Batch:
        graph = self._graph
        share = torch.ones(1, device=self._device)
        return Batch(self._x.to(self._device), graph.adj.to(self._device), graph.y, graph.train, share)

    def rows(self, split: str) -> Tensor:
        """Where the split's nodes are in what :meth:`logits` gives."""
        ids = self._splits[split]
        return ids.to(self._device) if self._layers is None else self._layers.rows(ids)

    def labels(self) -> Tensor:
        """Of the rows of :meth:`logits`."""
        return self._graph.y.to(self._device) if self._layers is None else self._layers.labels()


def _dense_rows(x: SparseFeatures, graph: Graph) -> Tensor:
    if x.shape[0] * x.shape[1] > MOST_DENSE:
        raise SpecError(
            f"graph {graph.name!r}: sampled batches have dense features, and {x.shape[0]:,} x {x.shape[1]:,} of them "
            "are too many; give the nodes narrower features, or train on the whole graph with mode='full'"
        )
    return x.to_dense()


def _has_loops(adj: Adjacency, device: torch.device) -> bool:
    """Whether any edge leads back to its source; ``device`` compares them in chunks."""
    rows = max(1, int(EDGES_AT_ONCE * adj.num_rows / max(adj.num_edges, 1)))
    for first in range(0, adj.num_rows, rows):
        last = min(first + rows, adj.num_rows)
        begin, end = int(adj.indptr[first]), int(adj.indptr[last])
        count = adj.indptr[first : last + 1].to(device).diff().long()
        ids = torch.arange(first, last, device=device, dtype=torch.int32)
        sources = adj.indices[begin:end].to(device)
        if bool((torch.repeat_interleave(ids, count, output_size=end - begin) == sources).any()):
            return True
    return False
