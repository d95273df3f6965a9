"""Hubs of a million neighbours: every sampler spreads its picks evenly over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.sampling.chi_square import normal_score
from tests.ops.sampling.graphs import CLOCK, sample_cpu, shared_hubs, star
from weft.ops.sampling.cpu import CpuSampler
from weft.ops.sampling.reference import make_clock, sample_reservoir_torch, sample_torch

MILLION, STRETCHES = 1_000_000, 500


def compiled(indptr, indices, hubs, fanout, clock, **options):
    # The relabelling table has an entry per neighbour, of which there are more than rows of this graph.
    sampler = CpuSampler(indptr, indices, **options)
    sampler.num_nodes = indices.numel()
    sampler._table = np.zeros(indices.numel(), np.int64)
    sampler.begin(hubs, clock)
    return sampler.hop(fanout, 0)[0]


def weighted(indptr, indices, *given):
    return compiled(indptr, indices, *given, weight=torch.full((indices.numel(),), 0.25))


SAMPLERS = {
    "reference": (sample_torch, MILLION, 4000),
    "cpu": (compiled, MILLION, 4000),
    "cpu, two threads": (lambda *given: compiled(*given, threads=2), MILLION, 6000),
    "replace, reference": (lambda *given: sample_torch(*given, replace=True), MILLION, 4000),
    "replace, cpu": (lambda *given: compiled(*given, replace=True), MILLION, 4000),
    "weighted": (weighted, MILLION, 8),  # one pass over all neighbours per hub
    "reservoir": (sample_reservoir_torch, 5_000, 1000),  # one step per neighbour; a million is for GPUs
}


@pytest.mark.parametrize("fanout", [1, 15, 1000])
@pytest.mark.parametrize("name", SAMPLERS)
def test_picks_fall_evenly_over_a_hub(name, fanout):
    sampler, degree, count = SAMPLERS[name]
    if fanout == 1000:
        if name in ("reference", "reservoir"):
            pytest.skip("compares every pick with all others")
        count = min(count, 40)
    indptr, indices, hubs = shared_hubs(degree, count)
    sample = sampler(indptr, indices, hubs, fanout, CLOCK)
    assert sample.edges.numel() == fanout * count
    stretches = min(STRETCHES, max(2, fanout * count // 10))
    counts = torch.bincount(sample.edges * stretches // degree, minlength=stretches).double()
    assert abs(normal_score(counts, torch.full_like(counts, fanout * count / stretches))) < 4.5
    if "replace" not in name:
        rows = sample.edges.reshape(count, fanout)
        assert all(row.unique().numel() == fanout for row in rows[:50])


@pytest.mark.parametrize("fanout", [MILLION - 1, MILLION - 10])
def test_what_is_left_of_a_hub_is_as_likely_to_be_any(fanout):
    indptr, indices = star(MILLION)
    sampler, counts = CpuSampler(indptr, indices), torch.zeros(5)
    for batch in range(8 if fanout == MILLION - 10 else 25):
        sampler.begin(torch.zeros(1, dtype=torch.int32), make_clock(11, 1, batch))
        sample, _ = sampler.hop(fanout, 0)
        missing = torch.ones(MILLION, dtype=torch.bool)
        missing[sample.edges] = False
        assert missing.sum() == MILLION - fanout
        counts += torch.bincount(missing.nonzero()[:, 0] * 5 // MILLION, minlength=5)
    assert abs(normal_score(counts, torch.full_like(counts, float(counts.sum() / 5)))) < 4.5


def test_all_of_a_hub():
    indptr, indices = star(MILLION)
    sample, found = sample_cpu(indptr, indices, torch.zeros(1, dtype=torch.int32), -1, CLOCK)
    assert torch.equal(sample.edges, torch.arange(MILLION))
    assert found.nodes.numel() == MILLION


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight": True}, {"threads": 2}], ids=str)
@pytest.mark.parametrize("fanout", [8, -1])
def test_edges_beyond_32_bits(tmp_path, fanout, options):
    """A graph of 2^31 + 2,000 edges, in files with holes: only the pages that are read exist."""
    num_edges = 2**31 + 2000
    indices, weight = (
        torch.from_numpy(np.memmap(tmp_path / name, kind, "w+", shape=(num_edges,)))
        for name, kind in (("indices", np.int32), ("weight", np.float32))
    )
    indices[-1000:] = torch.arange(1000, dtype=torch.int32)
    weight[-1000:] = 1 + torch.arange(1000) % 3
    indptr, seeds = torch.tensor([0, 5, num_edges - 1000, num_edges]), torch.tensor([2, 0, 2], dtype=torch.int32)
    given = {**options, "weight": weight} if "weight" in options else options
    sample = compiled(indptr, indices, seeds, fanout, CLOCK, **given)
    assert int(sample.edges.max()) > 2**31
    given = {name: value for name, value in given.items() if name != "threads"}
    assert torch.equal(sample.edges, sample_torch(indptr, indices, seeds, fanout, CLOCK, **given).edges)
