"""Sampled: batches of sampled neighbourhoods, made by overlapping stages or on the GPU, and exact evaluation.

Shapes: N nodes, S seeds of a batch, M nodes of a batch, T members, H features of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.batches.block import MiniBatch, Subgraph, exact_device, local_adjacency
from weft.batches.cache import CacheChoice, Presampled, choose_cache, policy_called
from weft.batches.features import FeatureStore
from weft.batches.layerwise import LayerWise
from weft.batches.pipeline import Pipeline, training_stages
from weft.batches.sampler import NeighbourSampler, SeedBatch, SeedOrder, edge_chunks, is_plain, padded_block, resolved
from weft.batches.source import Batch, FullGraph, Infer, MakeSource, SourceRequest
from weft.core.errors import SpecError
from weft.core.placement import EVALUATION_EDGES, DataPlacement
from weft.core.plan import Plan
from weft.core.settings import Hop, most_picks
from weft.core.task import Task
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency
from weft.ops.reduce import ONE_RANK
from weft.ops.sampling.compact_triton import DeviceHop
from weft.ops.sampling.gather_rows import clear_rows_triton
from weft.ops.sampling.reference import epoch_clocks

MOST_DENSE = 1 << 34  # values of sparse features that are made dense for batches
WHOLE_BYTES = 1 << 32  # features up to which a graph on the device is evaluated as a whole, where no plan says


# ---- Batches that are made on the GPU.
#
# One CUDA graph samples, gathers, builds and trains: a replay reads ``seeds [S]`` int32 and ``clock [3]`` int64 again.
# Or two graphs: one fetches into buffers and one trains on them, so that the next batch is fetched meanwhile
# (:mod:`weft.runtime.epoch`).


@dataclass(frozen=True)
class Fetched:
    """What a batch is built from: padded hops, seeds outwards, features ``x [M, F]`` and the seeds' labels."""

    hops: tuple[DeviceHop, ...]
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class DeviceBatch(Batch):
    """A batch that is made on the GPU; ``fetch(batch, buffer)`` and ``build(batch, fetched)`` are its source's."""

    seeds: Tensor | None = None
    clock: Tensor | None = None
    fetch: Callable[[DeviceBatch, int], Fetched] | None = None
    build: Callable[[DeviceBatch, Fetched], Batch] | None = None

    def fetched(self, buffer: int) -> Fetched:
        """Sample and gather into buffers number ``buffer``."""
        return self.fetch(self, buffer)

    def built(self, fetched: Fetched) -> Batch:
        """The padded batch."""
        return self.build(self, fetched)


class DeviceSeeds:
    """Seeds and clocks of the batches of two epochs at a time, the one in training and the next, made on the device.

    ``order`` of the seeds, ``seed`` of all draws. They are made once per epoch, by kernels: a copy per batch, however
    small, could wait in line for a batch of the host's that the bus is carrying.
    """

    def __init__(self, order: SeedOrder, seed: int, device: torch.device) -> None:
        self._order, self._seed, self._device = order, seed, device
        self._made: dict[tuple[int, object], tuple[Tensor, Tensor]] = {}  # seeds and clocks by epoch and stream

    def of(self, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        """Seeds ``[B]`` int32 and the clock ``[3]`` int64 of a batch, both on the device, for its current stream."""
        ids, clocks = self._of_epoch(epoch)
        size = self._order.batch_size
        return ids[batch * size : (batch + 1) * size], clocks[batch]

    def on_host(self, epoch: int) -> list[SeedBatch]:
        """The batches of an epoch in host memory; the device sorts them, a host takes longer."""
        batches = self._of_epoch(epoch)[0].cpu().long().split(self._order.batch_size)
        return [SeedBatch(epoch, number, seeds) for number, seeds in enumerate(batches)]

    def _of_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        if (epoch, stream) not in self._made:
            newest = list(self._made.items())[-1:]
            ids = self._order.seeds[self._order.permutation(epoch)].to(self._device, torch.int32)
            clocks = epoch_clocks(self._seed, epoch, len(self._order), self._device)
            self._made = {**dict(newest), (epoch, stream): (ids, clocks)}
        return self._made[epoch, stream]


class FeatureBuffer:
    """Memory for the features of captured batches: ``rows`` as wide as those of ``x``; zeros from ``filled [1]`` on.

    Batches differ in size, so a larger one leaves rows behind. Nothing aggregates them, but attention shifts its scores
    by a bound over all rows: with zeros there, a step depends on its batch alone.
    """

    def __init__(self, rows: int, x: Tensor, device: torch.device) -> None:
        self.rows = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=device)
        self.filled = torch.zeros(1, dtype=torch.int32, device=device)

    def read(self, store: FeatureStore, nodes: Tensor, count: Tensor, concurrent: bool = False) -> Tensor:
        """The features ``[M, F]`` of the first ``count [1]`` of ``nodes [M]``, zeros behind them; nothing is read back.

        ``concurrent``: other work runs on the device at the same time.
        """
        features = store.read_padded(nodes, count, self.rows[: nodes.numel()], concurrent=concurrent)
        clear_rows_triton(features, count, self.filled)
        return features


@dataclass(frozen=True)
class Sampling:
    """How to sample: neighbours per hop from the seeds outwards, seeds per batch, and the seed of all draws.

    ``captured``: sample, gather and train as CUDA graphs where the GPU reaches everything.
    ``depth``: finished batches that wait per stage, 1 for none at all (synchronous). ``placement``: what a plan says of
    where things lie, and ``policy`` a cache policy of the user's own.
    """

    fanout: tuple[Hop, ...]
    batch: int
    seed: int = 0
    depth: int = 2
    captured: bool = True
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
    sampling = Sampling(task.fanouts, task.batch, task.batch_seed)
    if plan is None:
        return sampling
    depth = max((stage.depth for stage in plan.stages), default=1)
    return replace(sampling, placement=plan.places, depth=depth, policy=policy)


class Sampled:
    """Seeds in an order of their own per epoch; blocks per layer, or one local subgraph for a user's module."""

    constant, reduce = False, ONE_RANK

    def __init__(self, request: SourceRequest, sampling: Sampling) -> None:
        graph, x, placement = request.graph, request.x, sampling.placement
        if isinstance(x, SparseFeatures):  # batches gather dense rows
            if x.shape[0] * x.shape[1] > MOST_DENSE:
                raise SpecError(
                    f"graph {graph.name!r}: sampled batches have dense features, and {x.shape[0]:,} x {x.shape[1]:,} "
                    "of them are too many; give the nodes narrower features, or train on the whole graph with "
                    "mode='full'"
                )
            x = x.to_dense()
        self._x, self._graph, self._placement = x, graph, placement
        self._fanouts = resolved(sampling.fanout, graph)
        self._apart = any(not isinstance(fanout, int) for fanout in self._fanouts)
        self._device = exact_device(request.device or graph.device)
        self._order = SeedOrder(graph.train, sampling.batch, sampling.seed)
        self._seeds = DeviceSeeds(self._order, sampling.seed, self._device)
        self.steps_per_epoch = len(self._order)
        # The device that trains also samples, if it reaches the edges.
        adj, plain = graph.adj, is_plain(self._fanouts)
        simple = plain and not request.subgraph and not self._apart
        away = self._device.type == "cuda" and adj.device.type == "cpu" and not (simple and adj.indices.is_pinned())
        backend = "default" if placement is None else placement.sampler
        if backend != "default" and (self._apart or not plain):
            raise SpecError(f"sampler={backend!r} needs one fan-out from 1 to 1,024 per hop; use sampler='default'")
        if backend != "default" and (away or self._device.type != "cuda"):
            raise SpecError(
                f"sampler={backend!r} runs on a GPU that reaches the edges; use topology='gpu', or sampler='default'"
            )
        make_sampler = partial(
            NeighbourSampler,
            graph,
            self._fanouts,
            backend="auto" if backend == "default" else backend,
            seed=sampling.seed,
            subgraph=request.subgraph,
            degrees="sampled" if request.subgraph or self._apart else "full",
            edge_attr=request.subgraph and "edge_attr" in request.of_edges,
            device=adj.device if away else self._device,
        )
        cached = CacheChoice()
        if placement is not None and placement.cached:
            batches = Presampled(make_sampler, self._order)
            policy = policy_called(placement.policy, sampling.policy, batches, placement, self._device)
            cached = choose_cache(placement, policy, graph, x)
        self._sampler = make_sampler(cached=cached.topology)
        self.store = FeatureStore(x, self._device, cached=cached.features)
        stages = training_stages(self._sampler, self.store, device=self._device)
        # A GPU that samples and gathers works ahead of the host by itself; threads of stages would only take the
        # interpreter from each other (H200, products shape: 61 ms per step with them, 16 without).
        overlaps = self._sampler.backend == "cpu" or self.store.tier == "host"
        self.pipeline = Pipeline(stages, sampling.depth if overlaps else 1)
        # Sampling and training can be CUDA graphs if the GPU reaches everything and there are no self loops to find.
        reached = self._device.type == "cuda" and self._sampler.device == self._device and self.store.tier != "host"
        capturable = reached and plain and adj.weight is None and request.padding and not request.subgraph
        loops = capturable and adj.derived("has loops", lambda: has_loops(adj, self._device))
        self._captured = sampling.captured and capturable and not loops
        self._buffers: dict[int, FeatureBuffer] = {}  # features of captured batches, at fixed addresses
        # Evaluated layer by layer if the plan says so; else if the graph is not on the device as a whole.
        layered = placement is not None and placement.evaluation == "layers"
        here = graph.device == self._device and x.device == self._device
        whole = here and (placement is not None or x.numel() * x.element_size() <= WHOLE_BYTES)
        chunk_edges = placement.chunk_edges if placement is not None and layered else EVALUATION_EDGES
        self._layers = None if whole and not layered else LayerWise(graph, x, self._device, chunk_edges)

    @property
    def overlaps(self) -> bool:
        """Whether the next batch is made on the device while the current one trains."""
        return self._captured and self._placement is not None and self._placement.overlap

    def reads(self) -> dict[str, float]:
        """Rows of features and neighbour lists that were read, and the shares that caches had; empty without any."""
        rates: dict[str, float] = {}
        if self._placement is not None and self._placement.features == "cached":
            counts = self.store.counts
            rates |= {"rows_read": counts.hits + counts.misses, "feature_hit_rate": counts.hit_rate}
        if self._sampler.cached is not None:
            lists, hits = self._sampler.cached.read.tolist()
            rates |= {"lists_read": lists, "list_hit_rate": hits / max(lists, 1)}
        return rates

    def counters(self) -> list[Tensor]:
        """Where the device counts reads: what a trial run of a captured step must restore."""
        return self.store.counters + ([] if self._sampler.cached is None else [self._sampler.cached.read])

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
        return DeviceBatch(
            self._x[:0],
            self._graph.adj,
            self._graph.y[:0],
            torch.arange(ids.numel(), device=self._device),
            torch.full((1,), ids.numel() / self._order.seeds.numel(), device=self._device),
            shape=("sampled", ids.numel()),
            varies=("seeds", "clock", "share"),
            seeds=ids,
            clock=clock,
            fetch=self._fetch,
            build=self._build,
        )

    def _fetch(self, batch: DeviceBatch, buffer: int) -> Fetched:
        """Sample and gather; nothing of it is read back by the host."""
        if buffer not in self._buffers:  # for the features of the largest batch; CUDA graphs keep the address
            rows = seeds = min(self._order.batch_size, self._order.seeds.numel())
            for fanout in self._fanouts:
                rows = min(rows * (most_picks(fanout) + 1), seeds + self._graph.num_nodes)
            self._buffers[buffer] = FeatureBuffer(rows, self._x, self._device)
        hops = self._sampler.sample_padded(batch.seeds, batch.clock)
        x = self._buffers[buffer].read(self.store, hops[-1].nodes, hops[-1].num_nodes, concurrent=self.overlaps)
        return Fetched(tuple(hops), x, self._graph.y.index_select(0, batch.seeds.long()))

    def _build(self, batch: DeviceBatch, fetched: Fetched) -> Batch:
        blocks = tuple(self._padded(hop) for hop in reversed(fetched.hops))
        return Batch(fetched.x, blocks, fetched.y, batch.rows, batch.share)

    def _padded(self, hop: DeviceHop) -> Adjacency:
        degrees = None if self._apart else lambda: self._sampler.full_degrees
        block = padded_block(hop.indptr, hop.indices, hop.nodes, self._graph.num_nodes, degrees)
        relation = self._sampler.relation_at(hop.edges)
        return block if relation is None else block.related(relation, self._graph.num_relations)

    def logits(self, infer: Infer, layers: int | None) -> Tensor:
        """Exact logits ``[T, K, C]``: full neighbourhoods, nothing sampled; of all nodes, or of those of the splits."""
        if self._layers is not None and layers is not None:
            return self._layers.logits(infer, layers)
        graph, share = self._graph, torch.ones(1, device=self._device)
        whole = Batch(self._x.to(self._device), graph.adj.to(self._device), graph.y, graph.train, share)
        logits = infer(whole)
        if self._layers is None:
            return logits
        return logits.index_select(-2, self._layers.results.ids.long().to(self._device))

    def rows(self, split: str) -> Tensor:
        """Where the split's nodes are in what :meth:`logits` gives."""
        ids: Tensor = getattr(self._graph, split)
        return ids.to(self._device) if self._layers is None else self._layers.rows(ids)

    def labels(self) -> Tensor:
        """Of the rows of :meth:`logits`."""
        return self._graph.y.to(self._device) if self._layers is None else self._layers.labels()


def has_loops(adj: Adjacency, device: torch.device) -> bool:
    """Whether any edge leads back to its source; ``device`` compares them in chunks."""
    return any(bool((of == adj.indices[edges].to(device)).any()) for _, edges, of in edge_chunks(adj, device))
