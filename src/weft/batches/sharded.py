"""Shard: the batches of one rank of several: its own rows of the graph, all of them in every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.batches.block import Block
from weft.batches.sampler import SeedBatch, SeedOrder, torch_hops
from weft.batches.source import Batch, FullGraph, SourceRequest
from weft.core.errors import InputError, SpecError
from weft.dist.ranks import Ranks, Route
from weft.dist.reduce import RankReduce
from weft.dist.sharded_adjacency import ShardedAdjacency, ShardGraph
from weft.ops.sampling.reference import HopSample, make_clock, sample_torch


class Shard(FullGraph):
    """One constant batch of own rows; losses, metrics and norms go through ``reduce`` over all ranks."""

    def __init__(self, request: SourceRequest, ranks: Ranks) -> None:
        super().__init__(request)
        graph = request.graph
        if not isinstance(graph, ShardGraph):
            raise InputError(f"graph {graph.name!r} is not a shard; make one with ShardGraph(graph, bounds, ranks)")
        self.reduce = RankReduce(ranks, graph.first_row, graph.num_nodes)  # type: ignore[assignment]
        share = torch.tensor([graph.train.numel() / max(graph.num_train, 1)], device=graph.device)
        self.batch = replace(self.batch, share=share, shape="shard")


# ---- ShardedSampled: data-parallel sampled training; ranks share every batch, and the graph is spread over their
# memories.
#
# A rank has the in-edges, features and labels of its own nodes. It takes its part of a batch's seeds, asks the owners
# of
# nodes for their sampled neighbours, hop by hop, then for features, and trains on its part; gradients are summed over
# ranks. A node's draws depend on the node and the batch alone, so every seed has the neighbourhood that it has on one
# rank, and the sum of the gradients is that of the whole batch.
#
# Shapes: n own nodes, S seeds of this rank's part of a batch, M nodes of it, F features.


@dataclass(frozen=True)
class ShardedSampling:
    """Makes the sources of a rank: neighbours per hop, seeds per batch of all ranks together, the seed of all draws."""

    ranks: Ranks
    fanout: tuple[int, ...]
    batch: int
    seed: int = 0

    def __call__(self, request: SourceRequest) -> ShardedSampled:
        """The source of a stack."""
        return ShardedSampled(request, self)


class ShardedSampled(Shard):
    """Batches of all ranks, each with this rank's part; evaluation is exact, over all nodes of all ranks."""

    constant = False

    def __init__(self, request: SourceRequest, sampling: ShardedSampling) -> None:
        super().__init__(request, sampling.ranks)
        graph = request.graph
        assert isinstance(graph.adj, ShardedAdjacency)
        if graph.device.type != "cpu":
            raise SpecError("sampled training over ranks runs on CPU ranks; give device='cpu', or one rank on a GPU")
        if request.subgraph:
            raise SpecError(
                "sampled training over ranks needs a model that takes a block per layer; train it on one rank"
            )
        if graph.adj.weight is not None:
            raise InputError(
                f"graph {graph.name!r} has edge weights, which sampled training over ranks does not read yet"
            )
        self._rows = rows = graph.adj.forward
        self._ranks, self._sampling, self._bounds = sampling.ranks, sampling, self._rows.exchange.bounds
        self._x = request.x if isinstance(request.x, Tensor) else request.x.to_dense()
        train = torch.cat(self._ranks.gather_objects(request.graph.train + self._rows.low))
        self._order = SeedOrder(train, sampling.batch, sampling.seed)
        self.steps_per_epoch = len(self._order)
        # ``(D^-1/2, degree) [n, 2]`` of own nodes in the whole graph, D with the added loops.
        here = rows.rows()
        other = (here != rows.columns.long()).float()
        total = torch.ones(rows.high - rows.low).index_add_(0, here - rows.low, other)
        self._degrees = torch.stack((total.rsqrt(), rows.indptr.diff().float()), 1)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """This rank's parts of the batches of ``epoch`` from ``first`` on."""
        yield from map(self._part, self._order.epoch(epoch, first))

    def _part(self, batch: SeedBatch) -> Batch:
        whole = batch.seeds.numel()
        low, high = (whole * rank // self._ranks.ranks for rank in (self._ranks.rank, self._ranks.rank + 1))
        seeds = batch.seeds[low:high].to(torch.int32)
        clock = make_clock(self._sampling.seed, batch.epoch, batch.batch)
        hops = torch_hops(self._sample, seeds, self._sampling.fanout, clock, "all")
        route = Route(hops[-1].nodes, self._bounds, self._ranks)
        x, degrees = route.rows(self._x), route.rows(self._degrees)
        blocks = []
        for hop in reversed(hops):  # the nodes of a hop are the first of those of the last one
            count, rows = hop.nodes.numel(), hop.indptr.numel() - 1
            scale, degree = degrees[:count, 0].contiguous(), degrees[:rows, 1].long()
            blocks.append(Block(hop.indptr, hop.indices, count, gcn_scale=scale, degree=degree).adjacency())
        y = Route(seeds, self._bounds, self._ranks).rows(self._graph.y)
        return Batch(
            x,
            tuple(blocks),
            y,
            torch.arange(seeds.numel()),
            torch.tensor([seeds.numel() / whole]),
            of_epoch=torch.tensor([whole / self._order.seeds.numel()]),
        )

    def _sample(self, nodes: Tensor, fanout: int, clock: Tensor, hop: int) -> HopSample:
        """Neighbours of any nodes, sampled by the ranks that own them."""
        rows = self._rows

        def answer(own: Tensor) -> tuple[Tensor, Tensor]:
            sample = sample_torch(rows.indptr, rows.columns, own, fanout, clock, hop, first=rows.low)
            return sample.indptr, sample.sources

        return Route(nodes, self._bounds, self._ranks).lists(answer)
