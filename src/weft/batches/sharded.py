"""Shard: the batches of one rank of several: its own rows of the graph, or its part of sampled batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from weft.batches.block import Block
from weft.batches.sampled import DeviceSeeds
from weft.batches.sampler import (
    Hop,
    SeedOrder,
    TritonHops,
    gcn_degrees,
    hop_sizes,
    is_plain,
    torch_hops,
    trimmed,
)
from weft.batches.source import Batch, FullGraph, SourceRequest
from weft.core.errors import InputError, SpecError
from weft.core.settings import Hop as Fanout
from weft.dist.ranks import Ranks
from weft.dist.reduce import RankReduce
from weft.dist.sharded_adjacency import ShardedAdjacency, ShardGraph, SpreadGraph
from weft.dist.spread import Spread
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sampling.compact_triton import DeviceHop
from weft.ops.sampling.reference import sample_torch


class Shard(FullGraph):
    """One constant batch of own rows; losses, metrics and norms go through ``reduce`` over all ranks."""

    def __init__(self, request: SourceRequest, ranks: Ranks) -> None:
        super().__init__(request)
        graph = request.graph
        if not isinstance(graph, ShardGraph):
            raise InputError(f"graph {graph.name!r} is not a shard; make one with ShardGraph(graph, bounds, ranks)")
        self.reduce = RankReduce(ranks, graph.first_row, graph.num_nodes)  # type: ignore[assignment]
        share = torch.full((1,), graph.train_share(), device=graph.device)
        self.batch = replace(self.batch, share=share, shape="shard")


# ---- ShardedSampled: data-parallel sampled training; ranks share every batch, and the graph is spread over their
# memories.
#
# A rank has the in-edges, features and labels of its own nodes. It takes its part of a batch's seeds, samples their
# neighbourhoods hop by hop from the edges of all ranks, reads features of all ranks, and trains on its part; gradients
# are summed over ranks. A node's draws depend on the node and the batch alone, so every seed has the neighbourhood that
# it has on one rank, and the sum of the gradients is that of the whole batch.
#
# On a GPU the next batch is sampled and read on a stream of its own while the current one trains, and while its
# gradients are summed: no rank waits for another to make a batch.
#
# Shapes: N nodes, n own nodes, S seeds of this rank's part of a batch, M nodes of it, F features.


@dataclass(frozen=True)
class ShardedSampling:
    """Makes the sources of a rank: neighbours per hop, seeds per batch of all ranks together, the seed of all draws."""

    ranks: Ranks
    fanout: tuple[Fanout, ...]
    batch: int
    seed: int = 0

    def __call__(self, request: SourceRequest) -> ShardedSampled:
        """The source of a stack."""
        return ShardedSampled(request, self)


@dataclass(frozen=True)
class PartOfBatch:
    """This rank's ``seeds [S]`` of a batch of ``whole`` seeds, and on a GPU what is on its way for them.

    ``hops`` and features ``x`` are padded; ``sizes`` are the true ones, on the host once ``ready``.
    """

    seeds: Tensor
    clock: Tensor
    whole: int
    hops: Sequence[DeviceHop] = ()
    x: Tensor | None = None
    sizes: Tensor | None = None
    ready: Any = None


class ShardedSampled(Shard):
    """Batches of all ranks, each with this rank's part; evaluation is exact, over all nodes of all ranks."""

    constant = False

    def __init__(self, request: SourceRequest, sampling: ShardedSampling) -> None:
        super().__init__(request, sampling.ranks)
        graph = request.graph
        assert isinstance(graph, ShardGraph)
        if request.subgraph:
            raise SpecError(
                "sampled training over ranks needs a model that takes a block per layer: in one subgraph for all "
                "layers a node also has edges that were sampled for the seeds of other ranks; train it on one rank"
            )
        if not all(isinstance(fanout, int) for fanout in sampling.fanout):
            raise SpecError("fan-outs per relation are sampled on one rank; over ranks give one number per hop")
        self._shard, self._ranks, self._sampling, self._device = graph, sampling.ranks, sampling, graph.device
        self._own_x = request.x
        train = torch.cat(self._ranks.gather_objects(graph.train.cpu() + graph.first_row)).to(self._device)
        self._order = SeedOrder(train, sampling.batch, sampling.seed)
        self._seeds = DeviceSeeds(self._order, sampling.seed, self._device)
        self.steps_per_epoch = len(self._order)

    @cached_property
    def _data(self) -> SpreadGraph:
        return self._shard.spread

    @cached_property
    def _x(self) -> Spread:
        """The features as the model takes them."""
        spread, x = self._data.x, self._own_x
        if spread is not None and x is spread.here:
            return spread
        return Spread(x if isinstance(x, Tensor) else x.to_dense(), self._data.bounds, self._ranks)

    @cached_property
    def _degrees(self) -> tuple[Tensor, Tensor]:
        """``(D^-1/2 [N], degree [N])`` of all nodes."""
        assert isinstance(self._shard.adj, ShardedAdjacency)
        rows = self._shard.adj.forward
        own = Adjacency(rows.indptr, rows.columns, self._data.bounds[-1], weight=rows.weight)
        scale = torch.cat(self._ranks.gather_objects(gcn_degrees(own, rows.low)[0].cpu()))
        return scale.to(self._device), self._data.indptr.diff().long()

    @cached_property
    def _hops(self) -> TritonHops | None:
        """The sampler of a GPU that reaches the edges of all ranks; None: hop by hop in torch."""
        data = self._data
        if not (data.columns.in_reach and self._x.in_reach and is_plain(self._sampling.fanout)):
            return None
        edges = data.weight is not None or data.relation is not None
        lists = data.columns.lists(data.indptr)
        return TritonHops(data.indptr, lists.indices, self._device, edges=edges, cached=lists)

    @cached_property
    def _stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """This rank's parts of the batches of ``epoch`` from ``first`` on; the next one is begun before one is used."""
        begun: PartOfBatch | None = None
        for number in range(first, self.steps_per_epoch):
            following = self._begin(epoch, number)
            if begun is not None:
                yield self._finished(begun)
            begun = following
        if begun is not None:
            yield self._finished(begun)

    def _begin(self, epoch: int, number: int) -> PartOfBatch:
        if self._hops is None:
            return self._part(epoch, number)
        # Memory of a batch that has been trained on is used again here: not before that training is over.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            part = self._part(epoch, number)
            hops = self._hops.padded(part.seeds, self._sampling.fanout, part.clock)
            sizes = hop_sizes(hops).to("cpu", non_blocking=True)
            x = self._x.rows(hops[-1].nodes, hops[-1].num_nodes)
            return replace(part, hops=hops, x=x, sizes=sizes, ready=self._stream.record_event())

    def _part(self, epoch: int, number: int) -> PartOfBatch:
        seeds, clock = self._seeds.of(epoch, number)
        whole, rank, ranks = seeds.numel(), self._ranks.rank, self._ranks.ranks
        return PartOfBatch(seeds[whole * rank // ranks : whole * (rank + 1) // ranks], clock, whole)

    def _finished(self, part: PartOfBatch) -> Batch:
        seeds, data = part.seeds, self._data
        if part.sizes is None:
            sample = partial(sample_torch, data.indptr, data.columns)
            hops = torch_hops(sample, seeds, self._sampling.fanout, part.clock, "all")
            x = self._x[hops[-1].nodes]
        else:
            part.ready.synchronize()
            torch.cuda.current_stream(self._device).wait_event(part.ready)
            hops = [trimmed(hop, *sizes) for hop, sizes in zip(part.hops, part.sizes.tolist(), strict=True)]
            assert part.x is not None
            x = part.x[: hops[-1].nodes.numel()]
        blocks = tuple(self._block(hop) for hop in reversed(hops))
        rows = torch.arange(seeds.numel(), device=self._device)
        shares = (seeds.numel() / part.whole, part.whole / self._order.seeds.numel())
        share, of_epoch = (torch.full((1,), number, device=self._device) for number in shares)
        return Batch(x, blocks, data.y[seeds], rows, share, of_epoch=of_epoch)

    def _block(self, hop: Hop) -> Adjacency:
        nodes, data = hop.nodes.long(), self._data
        values = {"weight": data.weight, "relation": data.relation}
        picked = {name: None if spread is None else spread[hop.edges] for name, spread in values.items()}
        scale, degree = self._degrees
        full = {"gcn_scale": scale[nodes], "degree": degree[nodes[: hop.indptr.numel() - 1]]}
        relations = self._graph.num_relations
        return Block(hop.indptr, hop.indices, nodes.numel(), **picked, **full, num_relations=relations).adjacency()
