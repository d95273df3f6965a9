"""Choose what a cache on the device holds: by a policy's name, or by a policy of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.placement import POLICIES, Placement
from weft.flow.features.cache_policy import BenefitDensity, ByDegree, ByPresampling, CacheChoice, CachePolicy
from weft.flow.sampling.batch import MiniBatch, Subgraph
from weft.flow.sampling.sampler import NeighbourSampler
from weft.flow.sampling.seeds import SeedOrder
from weft.graph.data.graph import Graph

SAMPLED_BATCHES = 32  # of the first epoch, by which presampling and benefit density rank


@dataclass(frozen=True)
class Presampled:
    """The first batches of an epoch, sampled when they are asked for, by a sampler made then; any number of times."""

    make_sampler: Callable[[], NeighbourSampler]
    order: SeedOrder

    def __iter__(self) -> Iterator[MiniBatch | Subgraph]:
        sampler = self.make_sampler()
        for seeds in islice(self.order.epoch(0), SAMPLED_BATCHES):
            yield sampler.sample(seeds.seeds, seeds.epoch, seeds.batch)


def policy_called(
    name: str, own: CachePolicy | None, batches: Presampled, placement: Placement, device: torch.device
) -> CachePolicy:
    """The policy of that name for batches on ``device``; ``own`` is the user's, whose name a plan has kept."""
    if own is not None and type(own).__name__ == name:
        return own
    if own is not None:
        raise InputError(f"cache_policy={type(own).__name__}: the plan caches what {name!r} chooses; plan again")
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


def choose_cache(placement: Placement, policy: CachePolicy, graph: Graph, x: Tensor) -> CacheChoice:
    """Rows of ``x`` and nodes whose lists to keep within ``placement.cache_bytes``, with the tables by node."""
    tables = 4 * graph.num_nodes * ((placement.features == "cached") + (placement.topology == "cached"))
    room = placement.cache_bytes - tables
    if room <= 0:
        return CacheChoice()
    row_bytes = x.shape[1] * x.element_size()
    choice = policy.choose(graph, row_bytes, room)
    _check_choice(choice, graph, row_bytes, room, policy)
    return choice


def _check_choice(choice: Any, graph: Graph, row_bytes: int, room: int, policy: Any) -> None:
    name = type(policy).__name__
    if not isinstance(choice, CacheChoice):
        raise InputError(f"{name}.choose returned {type(choice).__name__}; expected a weft.flow.CacheChoice")
    taken = choice.bytes(graph, row_bytes)
    if taken > room:
        raise InputError(f"{name}.choose takes {taken:,} bytes of the cache, which has room for {room:,}")


def policy_name(policy: Any) -> str:
    """What a plan calls a policy; a :class:`InputError` for what is none."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise InputError(f"cache_policy={policy!r} must be one of {', '.join(POLICIES)}, or have a choose method")
        return policy
    if not callable(getattr(policy, "choose", None)):
        raise InputError(f"cache_policy={policy!r} must be one of {', '.join(POLICIES)}, or have a choose method")
    return type(policy).__name__
