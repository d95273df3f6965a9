"""Shard: the batches of one rank of several: its own rows of the graph, or its part of sampled batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from weft.batches.block import Block, Subgraph, local_adjacency
from weft.batches.sampled import DeviceBatch, DeviceSeeds, Fetched, Sampling
from weft.batches.sampler import (
    Hop,
    SeedOrder,
    TritonHops,
    gcn_degrees,
    is_plain,
    local_edges,
    padded_block,
    torch_hops,
)
from weft.batches.source import Batch, FullGraph, SourceRequest
from weft.core.errors import SpecError
from weft.dist.partition import divided_otherwise
from weft.dist.ranks import Ranks
from weft.dist.reduce import RankReduce
from weft.dist.sharded_adjacency import Spread
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sampling.compact_triton import DeviceHop
from weft.ops.sampling.reference import sample_torch


class Shard(FullGraph):
    """One constant batch of own rows; losses, metrics and norms go through ``reduce`` over all ranks."""

    def __init__(self, request: SourceRequest, ranks: Ranks) -> None:
        super().__init__(request)
        graph = request.graph
        self.reduce = RankReduce(ranks, graph.first_row, graph.num_nodes)  # type: ignore[assignment]
        share = torch.full((1,), graph.train_share(), device=graph.device)
        self.batch = replace(self.batch, share=share, shape="shard")

    def trials(self, otherwise: bool = False) -> Iterator[tuple[Batch, int]]:
        """Batches to train on, each with which row of all ranks its first is; ``otherwise``: divided differently.

        The rows of a shard are divided by its graph.
        """
        yield self.batch, self.reduce.first_row


# ---- ShardedSampled: data-parallel sampled training; ranks share every batch, and the graph is spread over their
# memories.
#
# A rank has the in-edges, features and labels of its own nodes. It takes its part of a batch's seeds, samples their
# neighbourhoods hop by hop from the edges of all ranks, reads features of all ranks, and trains on its part; gradients
# are summed over ranks. A node's draws depend on the node and the batch alone, so every seed has the neighbourhood that
# it has on one rank, and the sum of the gradients is that of the whole batch.
#
# On a GPU batches are padded, made and trained on by CUDA graphs, and the next one is sampled and read while one trains
# and its gradients are summed: no rank waits for another to make a batch. Where that cannot be (edges with weights,
# self loops, modules of a user's own, fan-outs of -1) batches have their true sizes, one after another.
#
# Shapes: N nodes, n own nodes, S seeds of this rank's part of a batch, M nodes of it, F features.

TRIALS = 8  # batches: in one of a few seeds of a small graph, rows that a module mixes may happen to be on one rank


class ShardedSampled(Shard):
    """Batches of all ranks, each with this rank's part; evaluation is exact, over all nodes of all ranks.

    ``sampling.batch``: seeds per batch of all ranks together.
    """

    constant = False

    def __init__(self, request: SourceRequest, ranks: Ranks, sampling: Sampling) -> None:
        graph, x = request.graph, request.x
        x = x if isinstance(x, Tensor) else x.to_dense()  # batches gather dense rows, and evaluations have the same
        super().__init__(replace(request, x=x), ranks)
        if not all(isinstance(fanout, int) for fanout in sampling.fanout):
            raise SpecError("fan-outs per relation are sampled on one rank; over ranks give one number per hop")
        self._shard, self._ranks, self._sampling, self._device = graph, ranks, sampling, graph.device
        self._own_x, self._subgraph = x, request.subgraph
        self._padding = request.padding and graph.adj.weight is None and not request.subgraph
        train = torch.cat(self._ranks.gather_objects(graph.train.cpu() + graph.first_row)).to(self._device)
        self._order = SeedOrder(train, sampling.batch, sampling.seed)
        self._seeds = DeviceSeeds(self._order, sampling.seed, self._device)
        self.steps_per_epoch = len(self._order)

    @cached_property
    def _x(self) -> Spread:
        """The features as the model takes them."""
        spread, x = self._shard.spread.x, self._own_x
        if spread is not None and x is spread.here:
            return spread
        return Spread(x, self._shard.spread.bounds, self._ranks)

    @cached_property
    def _degrees(self) -> tuple[Tensor, Tensor]:
        """``(D^-1/2 [N], degree [N])`` of all nodes."""
        rows = self._shard.adj.forward
        adj = Adjacency(rows.indptr, rows.columns, self._shard.spread.bounds[-1], weight=rows.weight)
        scale = torch.cat(self._ranks.gather_objects(gcn_degrees(adj, rows.low)[0].cpu()))
        return scale.to(self._device), self._shard.spread.indptr.diff().long()

    @cached_property
    def _hops(self) -> TritonHops | None:
        """The sampler of a GPU that reaches the edges of all ranks; None: hop by hop in torch."""
        data = self._shard.spread
        if not (data.columns.in_reach and self._x.in_reach and is_plain(self._sampling.fanout)):
            return None
        edges = data.weight is not None or data.relation is not None
        lists = data.columns.lists(data.indptr)
        return TritonHops(data.indptr, lists.indices, self._device, edges=edges, cached=lists)

    @cached_property
    def overlaps(self) -> bool:  # type: ignore[override]
        """Whether batches are padded, and the next one is made while one trains; the same on all ranks."""
        rows, seeds = self._shard.adj.forward, self._order.seeds.numel()
        smallest = min(self._order.batch_size, seeds % self._order.batch_size or seeds)
        padded = self._padding and self._hops is not None and smallest >= self._ranks.ranks and self._degrees
        return all(self._ranks.gather_objects(padded and not bool((rows.rows() == rows.columns).any())))

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """This rank's parts of the batches of ``epoch`` from ``first`` on."""
        for number in range(first, self.steps_per_epoch):
            yield self._part(epoch, number, self._bounds(self._seeds.of(epoch, number)[0].numel()), self.overlaps)

    def example(self) -> Batch:
        """This rank's part of the first batch."""
        return next(self.trials())[0]

    def trials(self, otherwise: bool = False) -> Iterator[tuple[Batch, int]]:
        """This rank's parts of the first batches, each with which of the seeds is its first."""
        for step in range(TRIALS):
            epoch, number = divmod(step, self.steps_per_epoch)
            bounds = self._bounds(self._seeds.of(epoch, number)[0].numel())
            bounds = divided_otherwise(bounds) if otherwise else bounds
            yield self._part(epoch, number, bounds, padded=False), bounds[self._ranks.rank]

    def _bounds(self, seeds: int) -> list[int]:
        """Where the parts of the ranks begin and end among the seeds of a batch."""
        return [seeds * rank // self._ranks.ranks for rank in range(self._ranks.ranks + 1)]

    def _part(self, epoch: int, number: int, bounds: Sequence[int], padded: bool) -> Batch:
        every, clock = self._seeds.of(epoch, number)
        whole, span = every.numel(), slice(*bounds[self._ranks.rank : self._ranks.rank + 2])
        seeds = every[span]
        shares = (seeds.numel() / whole, whole / self._order.seeds.numel())
        share, of_epoch = (torch.full((1,), value, device=self._device) for value in shares)
        rows = torch.arange(seeds.numel(), device=self._device)
        part = Batch(self.batch.x, (), seeds, rows, share, of_epoch=of_epoch)
        if self._subgraph:
            return self._local(every, span, clock, part)
        if not padded:
            return self._sampled(seeds, clock, part)
        captured = {"shape": ("part", seeds.numel()), "varies": ("seeds", "clock", "share", "of_epoch")}
        methods = {"fetch": self._fetch, "build": self._build}
        return DeviceBatch(**{**vars(part), **captured}, **methods, seeds=seeds, clock=clock)

    def _sampled(self, seeds: Tensor, clock: Tensor, part: Batch) -> Batch:
        """The part of a batch in its true size."""
        data = self._shard.spread
        hops_of = self._hops or partial(torch_hops, partial(sample_torch, data.indptr, data.columns))
        hops = hops_of(seeds, self._sampling.fanout, clock, "all")
        blocks = tuple(self._block(hop) for hop in reversed(hops))
        return replace(part, x=self._x[hops[-1].nodes], blocks=blocks, y=data.y[seeds])

    def _local(self, every: Tensor, span: slice, clock: Tensor, part: Batch) -> Batch:
        """The part of a batch for a model that takes one subgraph for all layers, as it is on one rank.

        There a node also has edges that were sampled for seeds of other ranks: every rank samples for all seeds, and
        reads and trains on what its own depend on.
        """
        data = self._shard.spread
        sample = partial(sample_torch, data.indptr, data.columns)
        hops = torch_hops(sample, every, self._sampling.fanout, clock, "new")
        edges, relations = torch.cat([hop.edges for hop in hops if hop.edges is not None]), self._graph.num_relations
        whole = Subgraph(local_edges(hops), hops[-1].nodes, every.numel(), edges, num_relations=relations)
        local = whole.leading_to(span.start, span.stop)
        local = replace(local, **self._of_edges(local.edges))
        return replace(part, x=self._x[local.nodes], blocks=local_adjacency(local), y=data.y[local.nodes])

    def _of_edges(self, edges: Tensor | None) -> dict[str, Tensor | None]:
        values = {"weight": self._shard.spread.weight, "relation": self._shard.spread.relation}
        return {name: None if spread is None or edges is None else spread[edges] for name, spread in values.items()}

    def _fetch(self, batch: DeviceBatch, buffer: int) -> Fetched:
        """Sample and read; nothing of it is read back by the host, and a CUDA graph has memory of its own for it."""
        hops = self._hops.padded(batch.seeds, self._sampling.fanout, batch.clock)
        return Fetched(tuple(hops), self._x.rows(hops[-1].nodes, hops[-1].num_nodes), self._shard.spread.y[batch.seeds])

    def _build(self, batch: DeviceBatch, fetched: Fetched) -> Batch:
        blocks = tuple(self._padded(hop) for hop in reversed(fetched.hops))
        return Batch(fetched.x, blocks, fetched.y, batch.rows, batch.share, of_epoch=batch.of_epoch)

    def _padded(self, hop: DeviceHop) -> Adjacency:
        data = self._shard.spread
        block = padded_block(hop.indptr, hop.indices, hop.nodes, data.bounds[-1], lambda: self._degrees)
        if data.relation is None:
            return block
        return block.related(data.relation.rows(hop.edges, hop.indptr[-1:]), self._graph.num_relations)

    def _block(self, hop: Hop) -> Adjacency:
        nodes, picked = hop.nodes.long(), self._of_edges(hop.edges)
        scale, degree = self._degrees
        full = {"gcn_scale": scale[nodes], "degree": degree[nodes[: hop.indptr.numel() - 1]]}
        relations = self._graph.num_relations
        return Block(hop.indptr, hop.indices, nodes.numel(), **picked, **full, num_relations=relations).adjacency()
