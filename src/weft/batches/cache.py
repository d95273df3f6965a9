"""Cache policies: which rows are worth device memory. A policy has one method, :meth:`CachePolicy.choose`.

A user's own policy is any object with that method. All are tested by one suite: ids are different and valid, and the
bytes stay within the budget.

Shapes: N nodes, F features, R chosen rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from weft.batches.block import MiniBatch, Subgraph
from weft.batches.sampler import NeighbourSampler, SeedOrder
from weft.core.errors import InputError
from weft.core.placement import DataPlacement
from weft.graph.graph import Graph

INDEX_BYTES = 4  # of one neighbour in the topology cache
ROW_BYTES = 8  # of a row's offset there
EDGES_AT_ONCE = 1 << 27
RANKING_BYTES = 64  # per node, of scores that are sorted
HOST = torch.device("cpu")


@dataclass(frozen=True)
class CacheChoice:
    """Ids int64, most valuable first: rows of features, and nodes whose neighbour lists to keep on the device."""

    features: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    topology: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def bytes(self, graph: Graph, row_bytes: int) -> int:
        """Device memory that the choice takes."""
        lists = int(_list_bytes(graph)[self.topology].sum()) if self.topology.numel() else 0
        return self.features.numel() * row_bytes + lists


class CachePolicy(Protocol):
    """Chooses what to keep on the device."""

    def choose(self, graph: Graph, row_bytes: int, budget: int) -> CacheChoice:
        """What to cache of ``graph`` within ``budget`` bytes; a feature row takes ``row_bytes``."""
        ...


def _list_bytes(graph: Graph) -> Tensor:
    return graph.adj.degrees().cpu() * INDEX_BYTES + ROW_BYTES


def ranking_device(graph: Graph, device: torch.device, budget: int) -> torch.device:
    """Where to rank nodes: on ``device`` if what the cache will take has room for it, else where the edges are.

    A host takes minutes for the billion edges that a GPU counts and sorts in a second.
    """
    return device if budget >= RANKING_BYTES * graph.num_nodes + 8 * EDGES_AT_ONCE else graph.adj.device


def _best(score: Tensor, row_bytes: int, budget: int) -> Tensor:
    """Ids of the highest scores that fit; equal scores by ascending id, rows without any score left out."""
    rows = min(budget // max(row_bytes, 1), score.numel())
    order = torch.sort(score, descending=True, stable=True).indices[:rows]
    return order[score[order] > 0].cpu()


@dataclass(frozen=True)
class ByDegree:
    """Features of the nodes with most out-edges: they are neighbours of most nodes (PaGraph).

    ``device``: that of the batches, which ranks the nodes if it has room.
    """

    device: torch.device = HOST

    def choose(self, graph: Graph, row_bytes: int, budget: int) -> CacheChoice:
        """See :class:`CachePolicy`."""
        device = ranking_device(graph, self.device, budget)
        counts = torch.zeros(graph.num_nodes, dtype=torch.int64, device=device)  # how often each node is a neighbour
        for part in graph.adj.indices.split(EDGES_AT_ONCE):
            counts += torch.bincount(part.to(device), minlength=graph.num_nodes)
        return CacheChoice(_best(counts, row_bytes, budget))


def count_reads(batches: Iterable[MiniBatch | Subgraph], num_nodes: int) -> tuple[Tensor, Tensor]:
    """``(features [N], lists [N])``: how often the batches read each node's features and its neighbour list."""
    features, lists = (torch.zeros(num_nodes, dtype=torch.int64) for _ in range(2))
    for batch in batches:
        nodes = batch.input_nodes.cpu().long()
        features.index_add_(0, nodes, torch.ones_like(nodes))
        sampled = [block.num_dst for block in batch.blocks] if isinstance(batch, MiniBatch) else [nodes.numel()]
        for count in sampled:
            lists.index_add_(0, nodes[:count], torch.ones_like(nodes[:count]))
    return features, lists


@dataclass(frozen=True)
class ByPresampling:
    """Features of the nodes that a few sampled batches read most often (GNNLab)."""

    batches: Iterable[MiniBatch | Subgraph]
    device: torch.device = HOST

    def choose(self, graph: Graph, row_bytes: int, budget: int) -> CacheChoice:
        """See :class:`CachePolicy`."""
        features, _ = count_reads(self.batches, graph.num_nodes)
        return CacheChoice(_best(features.to(ranking_device(graph, self.device, budget)), row_bytes, budget))


@dataclass(frozen=True)
class BenefitDensity:
    """Features and neighbour lists in one ranking by reads saved per byte (DUCATI).

    A read of a feature row saves ``row_bytes`` over the link; a read of a neighbour list saves ``list_read_bytes``
    (offsets and the picks of one fan-out). Entries are taken greedily by saved bytes per byte of cache. ``features``
    and ``lists``: whether each may be taken at all.
    """

    batches: Iterable[MiniBatch | Subgraph]
    list_read_bytes: int = 64
    features: bool = True
    lists: bool = True

    def choose(self, graph: Graph, row_bytes: int, budget: int) -> CacheChoice:
        """See :class:`CachePolicy`."""
        features, lists = count_reads(self.batches, graph.num_nodes)
        sizes = torch.cat([torch.full_like(features, row_bytes), _list_bytes(graph)])
        gains = [self.features * features * row_bytes, self.lists * lists * self.list_read_bytes]
        saved = torch.cat(gains).to(torch.float64)
        order = torch.sort(saved / sizes, descending=True, stable=True).indices
        order = order[saved[order] > 0]
        taken = order[sizes[order].cumsum(0) <= budget]
        is_row = taken < graph.num_nodes
        return CacheChoice(taken[is_row], taken[~is_row] - graph.num_nodes)


# ---- What a cache on the device holds, by a policy's name or a policy of the user's own.

SAMPLED_BATCHES = 32  # of the first epoch, by which presampling and benefit density rank


@dataclass(frozen=True)
class Presampled:
    """The first batches of an epoch, sampled anew in every iteration, by a sampler made then."""

    make_sampler: Callable[[], NeighbourSampler]
    order: SeedOrder

    def __iter__(self) -> Iterator[MiniBatch | Subgraph]:
        sampler = self.make_sampler()
        for seeds in islice(self.order.epoch(0), SAMPLED_BATCHES):
            yield sampler.sample(seeds.seeds, seeds.epoch, seeds.batch)


def policy_called(
    name: str, user_policy: CachePolicy | None, batches: Presampled, placement: DataPlacement, device: torch.device
) -> CachePolicy:
    """The policy of that name for batches on ``device``; ``user_policy``: one of the user's, whose name a plan has."""
    if user_policy is not None and type(user_policy).__name__ == name:
        return user_policy
    if user_policy is not None:
        raise InputError(
            f"cache_policy={type(user_policy).__name__}: the plan caches what {name!r} chooses; plan again"
        )
    if name == "degree":
        return ByDegree(device)
    if name == "presampling":
        return ByPresampling(batches, device)
    if name == "benefit":
        kinds = {"features": placement.features == "cached", "lists": placement.topology == "cached"}
        return BenefitDensity(batches, **kinds)
    raise InputError(
        f"the plan caches what {name!r} chooses, an object that a plan cannot hold; give it as cache_policy="
    )


def choose_cache(placement: DataPlacement, policy: CachePolicy, graph: Graph, x: Tensor) -> CacheChoice:
    """Rows of ``x`` and nodes whose lists to keep within ``placement.cache_bytes``, with the tables by node."""
    tables = 4 * graph.num_nodes * ((placement.features == "cached") + (placement.topology == "cached"))
    room = placement.cache_bytes - tables
    if room <= 0:
        return CacheChoice()
    row_bytes = x.shape[1] * x.element_size()
    choice, name = policy.choose(graph, row_bytes, room), type(policy).__name__
    if not isinstance(choice, CacheChoice):
        raise InputError(f"{name}.choose returned {type(choice).__name__}; expected a weft.batches.CacheChoice")
    taken = choice.bytes(graph, row_bytes)
    if taken > room:
        raise InputError(f"{name}.choose takes {taken:,} bytes of the cache, which has room for {room:,}")
    return choice
