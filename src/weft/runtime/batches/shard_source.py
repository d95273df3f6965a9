"""Shard: the batches of one rank of several: its own rows of the graph, all of them in every step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weft.core.errors import InputError
from weft.dist.ranks import Ranks
from weft.dist.reduce import RankReduce
from weft.dist.shard_graph import ShardGraph
from weft.runtime.batches.source import FullGraph, SourceRequest


@dataclass(frozen=True)
class Sharding:
    """Makes the sources of a rank whose graph is a :class:`ShardGraph`."""

    ranks: Ranks

    def __call__(self, request: SourceRequest) -> Shard:
        """The source of a stack."""
        return Shard(request, self.ranks)


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
