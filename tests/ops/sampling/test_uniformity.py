"""Every sampler picks every neighbour, and every subset, equally often; no stream repeats another."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from tests.ops.sampling.chi_square import normal_score
from tests.ops.sampling.graphs import many_stars, random_csr, sample_cpu, star
from weft.ops.sampling.cpu import CpuSampler
from weft.ops.sampling.reference import (
    draw_exponential,
    hop_key,
    make_clock,
    node_streams,
    sample_reservoir_torch,
    sample_torch,
)


def floyd(*given, **options):
    return sample_torch(*given, **options)


def compiled(*given, **options):
    return sample_cpu(*given, **options)[0]


def weighted(indptr, indices, *given, **options):
    return sample_cpu(indptr, indices, *given, weight=torch.full((indices.numel(),), 0.5), **options)[0]


SAMPLERS = {"reference": floyd, "cpu": compiled, "reservoir": sample_reservoir_torch, "weighted": weighted}


@pytest.mark.parametrize("fanout", [1, 2, 5, 6])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_neighbour_is_as_likely(name, fanout):
    """Degree 7: k = 1, k = degree - 1 and between, 20,000 nodes with streams of their own."""
    degree, nodes = 7, 20_000
    indptr, indices = many_stars(degree, nodes)
    sample = SAMPLERS[name](indptr, indices, torch.arange(nodes), fanout, make_clock(5, 0, 0))
    counts = torch.bincount(sample.sources, minlength=degree).double()
    expected = torch.full((degree,), nodes * fanout / degree)
    # Without replacement a count varies by the factor 1 - k/d less than an independent one; undo that.
    score = normal_score(expected + (counts - expected) / (1 - fanout / degree) ** 0.5, expected)
    assert abs(score) < 4.5
    assert counts.min() > 0


@pytest.mark.parametrize("name", ["reference", "cpu", "reservoir"])
@pytest.mark.parametrize("fanout", [2, 3, 4])
def test_every_subset_is_as_likely(name, fanout):
    degree, nodes = 5, 30_000
    indptr, indices = many_stars(degree, nodes)
    sample = SAMPLERS[name](indptr, indices, torch.arange(nodes), fanout, make_clock(6, 0, 0))
    picked = sample.sources.reshape(nodes, fanout).long()
    assert all(len(set(row)) == fanout for row in picked[:500].tolist())
    codes = (1 << picked).sum(1)
    subsets = torch.tensor([sum(1 << i for i in subset) for subset in combinations(range(degree), fanout)])
    counts = torch.stack([(codes == code).sum() for code in subsets]).double()
    assert counts.sum() == nodes
    assert abs(normal_score(counts, torch.full_like(counts, nodes / counts.numel()))) < 4.5


def test_with_replacement_every_tuple_is_as_likely():
    degree, nodes, fanout = 3, 30_000, 2
    indptr, indices = many_stars(degree, nodes)
    sample = compiled(indptr, indices, torch.arange(nodes), fanout, make_clock(7, 0, 0), replace=True)
    codes = sample.sources.reshape(nodes, fanout).long() @ torch.tensor([degree, 1])
    counts = torch.bincount(codes, minlength=degree**fanout).double()
    assert abs(normal_score(counts, torch.full_like(counts, nodes / counts.numel()))) < 4.5


@pytest.mark.parametrize("degree", [100_000, 1_000_000])
def test_hubs(degree):
    """Over many batches, the picks of a hub fall evenly over 1,000 stretches of its neighbours."""
    indptr, indices = star(degree)
    sampler, fanout, batches = CpuSampler(indptr, indices), 1000, 200
    counts = torch.zeros(1000, dtype=torch.int64)
    for batch in range(batches):
        sampler.begin(torch.zeros(1, dtype=torch.int32), make_clock(8, 0, batch))
        sample, _ = sampler.hop(fanout, 0)
        assert sample.edges.unique().numel() == fanout
        counts += torch.bincount(sample.edges * 1000 // degree, minlength=1000)
    assert abs(normal_score(counts.double(), torch.full((1000,), fanout * batches / 1000.0))) < 4.5


@pytest.mark.parametrize("fanout", [99_999, 99_990])
def test_almost_all_of_a_hub(fanout):
    """What is left out is as likely to be any neighbour."""
    degree = 100_000
    indptr, indices = star(degree)
    sampler, counts = CpuSampler(indptr, indices), torch.zeros(20)
    batches = 60 if fanout == 99_990 else 150
    for batch in range(batches):
        sampler.begin(torch.zeros(1, dtype=torch.int32), make_clock(9, 1, batch))
        sample, _ = sampler.hop(fanout, 0)
        missing = torch.ones(degree, dtype=torch.bool)
        missing[sample.edges] = False
        assert missing.sum() == degree - fanout
        counts += torch.bincount(missing.nonzero()[:, 0] * 20 // degree, minlength=20)
    assert abs(normal_score(counts, torch.full_like(counts, float(counts.sum() / 20)))) < 4.5


def test_one_of_two_neighbours_picks_the_last_as_well():
    """A draw below j instead of j + 1 would never pick it."""
    indptr, indices = many_stars(2, 1000)
    picks = compiled(indptr, indices, torch.arange(1000), 1, make_clock(0, 0, 0)).sources
    assert 400 < int((picks == 1).sum()) < 600


def test_weights_are_the_odds():
    nodes, weight = 40_000, torch.tensor([1.0, 2.0, 0.0, 5.0])
    indptr, indices = many_stars(4, nodes)
    sample = compiled(indptr, indices, torch.arange(nodes), 1, make_clock(2, 0, 0), weight=weight.repeat(nodes))
    counts = torch.bincount(sample.sources, minlength=4)[[0, 1, 3]].double()
    assert abs(normal_score(counts, nodes * torch.tensor([1, 2, 5]) / 8)) < 4.5
    pair = compiled(indptr, indices, torch.arange(nodes), 2, make_clock(2, 0, 0), weight=weight.repeat(nodes))
    codes = (1 << pair.sources.reshape(nodes, 2).long()).sum(1)
    # P({a, b}) = a/8 * b/(8-a) + b/8 * a/(8-b)
    odds = torch.tensor([a * b / 8 * (1 / (8 - a) + 1 / (8 - b)) for a, b in ((1, 2), (1, 5), (2, 5))])
    counts = torch.stack([(codes == code).sum() for code in (0b11, 0b1001, 0b1010)]).double()
    assert abs(normal_score(counts, nodes * odds)) < 4.5


def test_exponential_draws_have_mean_and_tail():
    streams = node_streams(hop_key(make_clock(0, 0, 0), 0), torch.arange(200_000))
    values = draw_exponential(streams, torch.tensor(3))
    assert values.min() > 0
    assert abs(float(values.mean()) - 1) < 0.01
    assert abs(float((values > 2).double().mean()) - 0.1353) < 0.004
    torch.testing.assert_close(values, -torch.log(torch.exp(-values)), rtol=1e-12, atol=1e-12)


def test_no_stream_repeats_another():
    """Seeds, epochs, batches, hops and nodes all move the draws, and none of them cancels another."""
    streams = [
        node_streams(hop_key(make_clock(seed, epoch, batch), hop), torch.arange(50))
        for seed in (0, 1, -1, 2**63)
        for epoch in range(4)
        for batch in range(4)
        for hop in range(4)
    ]
    every = torch.cat(streams)
    assert every.unique().numel() == every.numel()
    indptr, indices = random_csr(most=50)
    first = floyd(indptr, indices, torch.arange(60), 5, make_clock(0, 0, 0), 0)
    for clock, hop in (
        (make_clock(1, 0, 0), 0),
        (make_clock(0, 1, 0), 0),
        (make_clock(0, 0, 1), 0),
        (make_clock(0, 0, 0), 1),
    ):
        other = floyd(indptr, indices, torch.arange(60), 5, clock, hop)
        assert (other.edges != first.edges).double().mean() > 0.5
