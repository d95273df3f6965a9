"""Sampled: batches of sampled neighbourhoods, made by overlapping stages, and exact evaluation layer by layer.

Shapes: N nodes, S seeds of a batch, M nodes of a batch, T members, H features of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import SpecError
from weft.core.fanout import Hop, is_per_relation
from weft.core.task import Task
from weft.flow.batch import MiniBatch, Subgraph
from weft.flow.feature_store import FeatureStore
from weft.flow.padded import PaddedAdjacency
from weft.flow.pipeline import Pipeline
from weft.flow.sampler import NeighbourSampler, is_plain
from weft.flow.seeds import SeedBatch, SeedOrder
from weft.flow.training_stages import training_stages
from weft.graph.data.graph import Graph
from weft.graph.data.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency
from weft.ops.csr.self_loops import has_loops
from weft.ops.reduce import ONE_RANK
from weft.ops.sampling.compact_triton import DeviceHop
from weft.ops.sampling.draws import make_clock
from weft.ops.sampling.gather_rows_triton import gather_rows_triton
from weft.runtime.batches.source import SPLITS, Batch, FullGraph, Infer, MakeSource, SourceRequest

EVALUATION_ROWS = 1 << 16  # nodes per chunk of a layer, in evaluation without the whole graph on the device
MOST_DENSE = 1 << 34  # values of sparse features that are made dense for batches
WHOLE_BYTES = 1 << 32  # activations of one layer up to which a graph on the device is evaluated as a whole


@dataclass(frozen=True)
class Sampling:
    """How to sample: neighbours per hop from the seeds outwards, seeds per batch, and the seed of all draws.

    ``captured``: sample, gather and train as one CUDA graph if all of it is on the GPU.
    ``depth``: finished batches that wait per stage, 1 for none at all (synchronous). ``workers``: threads that sample
    on a CPU. ``device``: where batches are trained on (None: where the graph is).
    """

    fanout: tuple[Hop, ...]
    batch: int
    seed: int = 0
    depth: int = 2
    workers: int = 1
    captured: bool = True
    device: torch.device | None = None

    def __call__(self, request: SourceRequest) -> Sampled:
        """The source of a stack."""
        return Sampled(request, self)


def source_for(task: Task) -> MakeSource:
    """The source of batches of ``task``, and of the tasks that share its group."""
    if not task.sampled:
        return FullGraph
    if task.traits is None and task.fanout is None:
        raise SpecError(
            f"task {task.label!r}: a model of your own needs fanout, the neighbours per hop, such as [15, 10]"
        )
    return Sampling(task.fanouts, task.batch, task.batch_seed)


@dataclass(frozen=True)
class DeviceBatch(Batch):
    """Seeds and a clock, from which the step itself samples, gathers and builds the batch on the GPU.

    So one CUDA graph does all of it: a replay reads ``seeds [S]`` int32 and ``clock [3]`` int64 again.
    """

    seeds: Tensor | None = None
    clock: Tensor | None = None
    make: Callable[[DeviceBatch], Batch] | None = None

    def prepared(self) -> Batch:
        """Sample, gather and build."""
        assert self.make is not None
        return self.make(self)


class Sampled:
    """Seeds in an order of their own per epoch; blocks per layer, or one local subgraph for a user's module."""

    constant, reduce = False, ONE_RANK

    def __init__(self, request: SourceRequest, sampling: Sampling) -> None:
        graph, x = request.graph, request.x
        self._x = x if isinstance(x, Tensor) else _dense_rows(x, graph)  # batches gather rows of it
        self._graph, self._sampling = graph, sampling
        self._apart = any(is_per_relation(hop) for hop in sampling.fanout)
        self._device = sampling.device or graph.device
        self._order = SeedOrder(graph.train, sampling.batch, sampling.seed)
        self.steps_per_epoch = len(self._order)
        about = {"seed": sampling.seed, "threads": 1, "device": self._device}
        self._sampler = NeighbourSampler(
            graph,
            sampling.fanout,
            degrees="sampled" if request.subgraph or self._apart else "full",
            subgraph=request.subgraph,
            **about,
        )
        self.store = FeatureStore(self._x, self._device)
        stages = training_stages(self._sampler, self.store, None, self._device, sampling.workers)
        # A GPU that samples and gathers works ahead of the host by itself; threads of stages would only take the
        # interpreter from each other (H200, products shape: 61 ms per step with them, 16 without).
        overlaps = self._sampler.backend == "cpu" or self.store.tier == "host"
        self.pipeline = Pipeline(stages, sampling.depth if overlaps else 1)
        self._splits = {name: getattr(graph, name) for name in SPLITS}
        self._captured = sampling.captured and request.padding and not request.subgraph and self._can_capture()
        self._features: Tensor | None = None  # of a captured batch, in a fixed place

    def _can_capture(self) -> bool:
        """Whether sampling and training can be one CUDA graph: all of it on the GPU, and no self loops to find."""
        graph, kept = self._graph, self._x.device.type == "cuda" or self._x.is_pinned()
        if self._device.type != "cuda" or graph.device != self._device or not kept or graph.adj.weight is not None:
            return False
        return is_plain(self._sampler.fanouts) and not has_loops(graph.adj.rows(), graph.adj.indices)

    # ---- training ------------------------------------------------------------------------------------

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` from ``first`` on; they depend on (sampling seed, epoch, batch) alone."""
        if self._captured:
            yield from map(self._device_batch, self._order.epoch(epoch, first))
            return
        for sampled in self.pipeline.run(self._order.epoch(epoch, first)):
            yield self._batch(sampled)

    def example(self) -> Batch:
        """The first batch of the first epoch."""
        seeds = next(iter(self._order.epoch(0)))
        sampled = self._sampler.sample(seeds.seeds, 0, 0)
        sampled = sampled.with_data(self.store.read(sampled.input_nodes)).to(self._device)
        return self._batch(sampled)

    def _batch(self, sampled: MiniBatch | Subgraph) -> Batch:
        if isinstance(sampled, MiniBatch):
            blocks, labelled = tuple(block.adjacency() for block in sampled.blocks), sampled.seeds
        else:
            blocks, labelled = _local_adjacency(sampled), sampled.nodes
        count = sampled.seeds.numel()
        rows = torch.arange(count, device=self._device)
        share = torch.full((1,), count / self._order.seeds.numel(), device=self._device)
        y = self._graph.y.index_select(0, labelled.to(self._graph.device).long()).to(self._device)
        return Batch(sampled.x, blocks, y, rows, share)

    def _device_batch(self, seeds: SeedBatch) -> DeviceBatch:
        ids = seeds.seeds.to(torch.int32)
        share = torch.full((1,), ids.numel() / self._order.seeds.numel(), device=self._device)
        clock = make_clock(self._sampling.seed, seeds.epoch, seeds.batch).to(self._device, non_blocking=True)
        rows, none = torch.arange(ids.numel(), device=self._device), self._graph.y[:0]
        about = {"shape": ("sampled", ids.numel()), "varies": ("seeds", "clock", "share")}
        return DeviceBatch(
            self._x[:0], self._graph.adj, none, rows, share, seeds=ids, clock=clock, make=self._make, **about
        )

    def _make(self, batch: DeviceBatch) -> Batch:
        """The padded batch: nothing of it is read back by the host."""
        hops = self._sampler.sample_padded(batch.seeds, batch.clock)
        last = hops[-1]
        if self._features is None or self._features.shape[0] < last.nodes.numel():
            # Rows beyond the existing ones are never read, but must be numbers: their gradients are zeros.
            self._features = torch.zeros(last.nodes.numel(), self._x.shape[1], dtype=self._x.dtype, device=self._device)
        features = self._features[: last.nodes.numel()]
        x = gather_rows_triton(self._x, last.nodes, features, count=last.num_nodes)
        y = self._graph.y.index_select(0, batch.seeds.long())
        blocks = tuple(self._padded(hop) for hop in reversed(hops))
        return Batch(x, blocks, y, batch.rows, batch.share)

    def _padded(self, hop: DeviceHop) -> PaddedAdjacency:
        nodes = hop.nodes.clamp(0, self._graph.num_nodes - 1).long()  # those beyond the existing ones hold anything
        full = None if self._apart else self._degrees_at(nodes, hop.indptr.numel() - 1)
        block = PaddedAdjacency(hop.indptr, hop.indices, nodes.numel(), full=full)
        relation = self._sampler.relation_at(hop.edges)
        return block if relation is None else block.related(relation, self._graph.num_relations)

    def _degrees_at(self, nodes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        scale, degree = self._sampler.full_degrees
        return scale.index_select(0, nodes), degree.index_select(0, nodes[:rows])

    # ---- evaluation ----------------------------------------------------------------------------------

    def logits(self, infer: Infer, layers: int | None) -> Tensor:
        """Exact logits ``[T, N, C]`` of all nodes: full neighbourhoods, nothing sampled."""
        if layers is None or self._fits_whole():
            return infer(self._whole())
        found = self._layer(infer, 0, None)
        for place in range(1, layers):
            found = self._layer(infer, place, found)
        return found

    def _fits_whole(self) -> bool:
        here = self._graph.device == self._device and self._x.device == self._device
        return here and self._x.numel() * self._x.element_size() <= WHOLE_BYTES

    def _whole(self) -> Batch:
        graph = self._graph
        share = torch.ones(1, device=self._device)
        return Batch(self._x.to(self._device), graph.adj, graph.y, graph.train, share)

    def _layer(self, infer: Infer, place: int, below: Tensor | None) -> Tensor:
        """One layer of all nodes ``[T, N, H]``, chunk by chunk; ``below``: the layer before it, None for the input."""
        sampler = self._full_sampler()
        out = None
        for first in range(0, self._graph.num_nodes, EVALUATION_ROWS):
            last = min(first + EVALUATION_ROWS, self._graph.num_nodes)
            ids = torch.arange(first, last, dtype=torch.int32, device=self._graph.device)
            block = sampler.sample(ids).to(self._device)
            found = infer(self._chunk(block, place, below))
            if out is None:
                out = found.new_empty(found.shape[0], self._graph.num_nodes, found.shape[-1])
            out[:, first:last] = found
        assert out is not None
        return out

    def _chunk(self, block: MiniBatch, place: int, below: Tensor | None) -> Batch:
        nodes = block.input_nodes
        if below is None:
            x = self.store.read(nodes)
        else:
            x = below.index_select(1, nodes.to(below.device).long()).to(self._device)
        rows = torch.arange(block.seeds.numel(), device=self._device)
        y = self._graph.y[:0].to(self._device)
        adjacency = block.blocks[0].adjacency()
        return Batch(x, adjacency, y, rows, torch.ones(1, device=self._device), layer=place)

    def _full_sampler(self) -> NeighbourSampler:
        return NeighbourSampler(self._graph, [-1], degrees="full", device=self._graph.device)

    def rows(self, split: str) -> Tensor:
        """The ids of the split's nodes."""
        return self._splits[split].to(self._device)

    def labels(self) -> Tensor:
        """Of all nodes."""
        return self._graph.y.to(self._device)


def _dense_rows(x: SparseFeatures, graph: Graph) -> Tensor:
    if x.shape[0] * x.shape[1] > MOST_DENSE:
        raise SpecError(
            f"graph {graph.name!r}: sampled batches have dense features, and {x.shape[0]:,} x {x.shape[1]:,} of them "
            "are too many; give the nodes narrower features, or train on the whole graph with mode='full'"
        )
    return x.to_dense()


def _local_adjacency(local: Subgraph) -> Adjacency:
    """The sampled edges as a square matrix over the batch's nodes, rows in the order of ``nodes``."""
    src, dst = local.edge_index
    order = torch.sort(dst, stable=True).indices
    count = local.nodes.numel()
    indptr = torch.zeros(count + 1, dtype=torch.int32, device=dst.device)
    torch.cumsum(torch.bincount(dst, minlength=count), 0, out=indptr[1:])
    weight = None if local.weight is None else local.weight[order]
    adj = Adjacency(indptr, src[order].to(torch.int32), count, weight=weight)
    return adj if local.relation is None else adj.related(local.relation[order], local.num_relations)
