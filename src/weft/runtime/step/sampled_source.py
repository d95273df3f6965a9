"""Sampled: batches of sampled neighbourhoods, made by overlapping stages, and exact evaluation layer by layer.

Shapes: N nodes, S seeds of a batch, M nodes of a batch, T members, H features of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import SpecError
from weft.flow.batch import MiniBatch, Subgraph
from weft.flow.feature_store import FeatureStore
from weft.flow.pipeline import Pipeline
from weft.flow.sampler import NeighbourSampler
from weft.flow.seeds import SeedOrder
from weft.flow.training_stages import training_stages
from weft.ops.csr.adjacency import Adjacency
from weft.ops.reduce import ONE_RANK
from weft.runtime.step.source import SPLITS, Batch, Infer, SourceRequest

EVALUATION_ROWS = 1 << 16  # nodes of one chunk of a layer, in evaluation without the whole graph on the device
WHOLE_BYTES = 1 << 32  # activations of one layer up to which a graph on the device is evaluated as a whole


@dataclass(frozen=True)
class Sampling:
    """How to sample: neighbours per hop from the seeds outwards, seeds per batch, and the seed of all draws.

    ``depth``: finished batches that wait per stage, 1 for none at all (synchronous). ``workers``: threads that sample
    on a CPU. ``device``: where batches are trained on (None: where the graph is).
    """

    fanout: tuple[int, ...]
    batch: int
    seed: int = 0
    depth: int = 2
    workers: int = 1
    device: torch.device | None = None

    def __call__(self, request: SourceRequest) -> Sampled:
        """The source of a stack."""
        return Sampled(request, self)


class Sampled:
    """Seeds in an order of their own per epoch; blocks per layer, or one local subgraph for a user's module."""

    constant, reduce = False, ONE_RANK

    def __init__(self, request: SourceRequest, sampling: Sampling) -> None:
        graph, self._x = request.graph, request.x
        self._graph, self._sampling = graph, sampling
        self._device = sampling.device or graph.device
        if not isinstance(request.x, Tensor):
            raise SpecError(f"graph {graph.name!r}: sampled training gathers rows, so its features must be dense")
        self._order = SeedOrder(graph.train, sampling.batch, sampling.seed)
        self.steps_per_epoch = len(self._order)
        about = {"seed": sampling.seed, "threads": 1, "device": self._device}
        self._sampler = NeighbourSampler(
            graph,
            sampling.fanout,
            degrees="sampled" if request.subgraph else "full",
            subgraph=request.subgraph,
            **about,
        )
        self.store = FeatureStore(request.x, self._device)
        stages = training_stages(self._sampler, self.store, None, self._device, sampling.workers)
        self.pipeline = Pipeline(stages, sampling.depth)
        self._splits = {name: getattr(graph, name) for name in SPLITS}

    # ---- training ------------------------------------------------------------------------------------

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` from ``first`` on; they depend on (sampling seed, epoch, batch) alone."""
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


def _local_adjacency(local: Subgraph) -> Adjacency:
    """The sampled edges as a square matrix over the batch's nodes, rows in the order of ``nodes``."""
    src, dst = local.edge_index
    order = torch.sort(dst, stable=True).indices
    count = local.nodes.numel()
    indptr = torch.zeros(count + 1, dtype=torch.int32, device=dst.device)
    torch.cumsum(torch.bincount(dst, minlength=count), 0, out=indptr[1:])
    weight = None if local.weight is None else local.weight[order]
    return Adjacency(indptr, src[order].to(torch.int32), count, weight=weight)
