"""Small CSR graphs for the sampling tests."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.sampling.cpu import CpuSampler
from weft.ops.sampling.reference import HopSample, Relabelled, make_clock


def random_csr(num_nodes: int = 60, most: int = 20, seed: int = 0, dtype=torch.int64) -> tuple[Tensor, Tensor]:
    """``(indptr, indices)``; node 3 has no in-edge, node 4 one from almost every node."""
    random = torch.Generator().manual_seed(seed)
    degree = torch.randint(0, most, (num_nodes,), generator=random)
    degree[3], degree[4] = 0, num_nodes - 1
    indptr = torch.zeros(num_nodes + 1, dtype=dtype)
    indptr[1:] = degree.cumsum(0)
    indices = torch.randint(0, num_nodes, (int(indptr[-1]),), generator=random, dtype=torch.int32)
    return indptr, indices


def star(degree: int) -> tuple[Tensor, Tensor]:
    """Node 0 has in-edges from the nodes ``0 .. degree - 1``; no other node has any."""
    indptr = torch.full((max(degree, 1) + 1,), degree, dtype=torch.int64)
    indptr[0] = 0
    return indptr, torch.arange(degree, dtype=torch.int32)


def many_stars(degree: int, count: int) -> tuple[Tensor, Tensor]:
    """``count`` nodes whose in-edges all come from the nodes ``0 .. degree - 1``, in that order."""
    indptr = torch.arange(max(count, degree) + 1) * degree
    return indptr, torch.arange(degree, dtype=torch.int32).repeat(max(count, degree))


SEEDS = torch.tensor([4, 3, 7, 7, 9, 10, 3, 49, 0], dtype=torch.int32)  # isolated, repeated, a hub
CLOCK = make_clock(1, 2, 3)


def assert_same_sample(mine, theirs) -> None:
    mine, theirs = mine.trimmed(), theirs.trimmed()
    assert torch.equal(mine.indptr, theirs.indptr)
    assert torch.equal(mine.sources, theirs.sources)
    if mine.edges is not None and theirs.edges is not None:
        assert torch.equal(mine.edges, theirs.edges)


def shared_hubs(degree: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(indptr, indices, hubs)``: ``count`` nodes that all have the in-edges from ``0 .. degree - 1``, stored once.

    ``indptr`` goes back after every hub, so the nodes between the hubs are no rows to sample; draws differ by node.
    """
    indptr = torch.tensor([0, degree]).repeat(count)
    return indptr, torch.arange(degree, dtype=torch.int32), torch.arange(0, 2 * count, 2, dtype=torch.int32)


def sample_cpu(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanout: int,
    clock: Tensor,
    hop: int = 0,
    *,
    replace: bool = False,
    weight: Tensor | None = None,
    threads: int = 1,
) -> tuple[HopSample, Relabelled]:
    """One hop of one batch; see :func:`weft.ops.sampling.reference.sample_torch`. ``sources`` are global ids."""
    sampler = CpuSampler(indptr, indices, replace=replace, weight=weight, threads=threads)
    sampler.begin(seeds.to(torch.int32), clock)
    sample, labels = sampler.hop(fanout, hop)
    return HopSample(sample.indptr, labels.nodes[labels.indices.long()], sample.edges), labels
