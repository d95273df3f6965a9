"""What a sampler of one hop returns, and the checks that all samplers share.

Shapes: N nodes, E edges, S seeds, K fan-out, P sampled edges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import GraphError, InputError

FULL = -1  # a fan-out: every neighbour
MOST_SLOTS = 2**31 - 1  # positions in a batch are int32


@dataclass(frozen=True)
class HopSample:
    """Sampled in-edges of S seeds as a CSR of global ids.

    ``indptr [S+1]`` int32, ``sources [P]`` int32: the picked neighbours of seed i are
    ``sources[indptr[i]:indptr[i+1]]``. ``edges [P]`` int64 holds where each picked edge is in the graph's CSR (None
    if it was not requested). On a GPU the arrays may be longer than ``indptr[-1]``; entries beyond are unspecified.
    """

    indptr: Tensor
    sources: Tensor
    edges: Tensor | None = None

    def trimmed(self) -> HopSample:
        """The same without unused slots; reads one number back from the device."""
        count = int(self.indptr[-1])
        return HopSample(self.indptr, self.sources[:count], None if self.edges is None else self.edges[:count])


@dataclass(frozen=True)
class Relabelled:
    """Compacted result of one hop: local ids in place of global ones.

    ``nodes [M]`` int32 are the hop's seeds in their order, then new neighbours in order of first appearance;
    ``indices [P]`` int32 are positions in ``nodes``. A neighbour that equals several seeds is the first of them.
    """

    nodes: Tensor
    indices: Tensor


def check_fanout(fanout: int, replace: bool = False, weighted: bool = False) -> None:
    """Raise an InputError for a fan-out that no sampler can take."""
    if fanout < 1 and fanout != FULL:
        raise InputError(f"fan-out {fanout} must be at least 1, or -1 for every neighbour")
    if replace and weighted:
        raise InputError("weighted sampling is without replacement; leave out replace=True or the weights")


def check_slots(seeds: int, fanout: int) -> None:
    """Raise an InputError if the positions of a hop could exceed 32 bits."""
    if seeds * (fanout + 1) > MOST_SLOTS:
        raise InputError(
            f"{seeds:,} nodes x fan-out {fanout} need more than 2^31 slots in one batch; use a smaller batch or fan-out"
        )


def check_seeds(seeds: Tensor, num_nodes: int) -> Tensor:
    """Seeds ``[S]`` as contiguous int32 if all are in ``[0, N)``; a GraphError that names the first other one.

    Reads the device once; samplers call this for ids that come from a user, not for those they found themselves.
    """
    if seeds.dim() != 1 or seeds.is_floating_point() or seeds.dtype == torch.bool:
        raise GraphError(f"seeds must be a vector of node ids, not {seeds.dtype} of shape {list(seeds.shape)}")
    wrong = (seeds < 0) | (seeds >= num_nodes)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0, 0])
        raise GraphError(f"seed {int(seeds[place])} at position {place} must be a node id from 0 to {num_nodes - 1}")
    return seeds.to(torch.int32).contiguous()
