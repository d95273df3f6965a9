"""The sampling, relabelling and gathering kernels give what the CPU gives, bit for bit."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.ops.sampling.graphs import CLOCK, SEEDS, assert_same_sample, random_csr
from weft.batches.sampler import torch_hops
from weft.ops.sampling.compact_triton import EMPTY, Compactor, sample_hops_triton
from weft.ops.sampling.cpu import CpuSampler
from weft.ops.sampling.gather_rows import GatherLaunch, gather_rows_torch, gather_rows_triton
from weft.ops.sampling.reference import make_clock, sample_reservoir_torch, sample_torch
from weft.ops.sampling.reservoir_triton import AS_DGL, ReservoirLaunch, launch_reservoir, sample_reservoir_triton
from weft.ops.sampling.sample_triton import CachedLists, SampleLaunch, launch_sample, sample_triton, spread_lists

NONE = SEEDS[:0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [1, 3, 7, 40, 58])
def test_default_sampler(fanout, replace, dtype):
    indptr, indices = random_csr(dtype=dtype)
    mine = sample_triton(
        indptr, indices, SEEDS, fanout, CLOCK, 1, replace=replace, edges=True, launch=SampleLaunch(8, 4)
    )
    assert_same_sample(mine, sample_torch(indptr, indices, SEEDS, fanout, CLOCK, 1, replace=replace))


def test_default_sampler_without_work():
    indptr, indices = random_csr()
    assert sample_triton(indptr, indices, NONE, 3, CLOCK).indptr.tolist() == [0]
    nothing = sample_triton(torch.zeros(61, dtype=torch.int32), indices[:0], SEEDS, 3, CLOCK)
    assert nothing.trimmed().sources.numel() == 0
    assert_same_sample(
        sample_triton(indptr, indices, SEEDS, -1, CLOCK), sample_torch(indptr, indices, SEEDS, -1, CLOCK)
    )


def test_edges_beyond_32_bits(tmp_path):
    """A graph of 2^31 + 2,000 edges, in a file with holes: only the pages that are read exist."""
    num_edges = 2**31 + 2000
    mapped = np.memmap(tmp_path / "indices", np.int32, "w+", shape=(num_edges,))
    mapped[-1000:] = np.arange(1000)
    indices, seeds = torch.from_numpy(mapped), torch.tensor([2, 0, 2], dtype=torch.int32)
    indptr = torch.tensor([0, 5, num_edges - 1000, num_edges])
    mine = sample_triton(indptr, indices, seeds, 6, CLOCK, edges=True, launch=SampleLaunch(4, 4))
    assert_same_sample(mine, sample_torch(indptr, indices, seeds, 6, CLOCK))
    assert int(mine.edges.max()) > 2**31
    mine = sample_reservoir_triton(indptr, indices, seeds, 6, CLOCK, edges=True)
    assert_same_sample(mine, sample_reservoir_torch(indptr, indices, seeds, 6, CLOCK))


@pytest.mark.parametrize("fanout", [1, 3, 7, 40])
def test_reservoir(fanout):
    indptr, indices = random_csr()
    expected = sample_reservoir_torch(indptr, indices, SEEDS, fanout, CLOCK, 2)
    for launch in (ReservoirLaunch(8, 2), AS_DGL):
        mine = sample_reservoir_triton(indptr, indices, SEEDS, fanout, CLOCK, 2, launch=launch, edges=launch is AS_DGL)
        assert_same_sample(mine, expected)
    assert mine.edges is not None


def test_reservoir_without_work():
    indptr, indices = random_csr()
    isolated = torch.full((5,), 3, dtype=torch.int32)
    assert sample_reservoir_triton(indptr, indices, NONE, 3, CLOCK).indptr.tolist() == [0]
    assert sample_reservoir_triton(indptr, indices, isolated, 3, CLOCK).indptr.tolist() == [0] * 6


@pytest.mark.parametrize("fanouts", [[2], [3, 2]], ids=str)
def test_hops_of_the_reservoir_with_compaction(fanouts):
    indptr, indices = random_csr(40)
    seeds, compactor = SEEDS % 40, Compactor(40, torch.device("cpu"), 64, 4)
    about = {"sample_hop": partial(launch_reservoir, launch=ReservoirLaunch(8, 2)), "edges": True}
    hops = sample_hops_triton(indptr, indices, seeds, fanouts, CLOCK, compactor, **about)
    plain = torch_hops(partial(sample_reservoir_torch, indptr, indices), seeds, fanouts, CLOCK, "all")
    for mine, hop in zip(hops, plain, strict=True):
        rows, nodes, edges = (int(n) for n in (mine.num_rows, mine.num_nodes, mine.indptr[-1]))
        assert torch.equal(mine.nodes[:nodes], hop.nodes)
        assert torch.equal(mine.indptr[: rows + 1], hop.indptr)
        assert torch.equal(mine.indices[:edges], hop.indices)
        assert torch.equal(mine.edges[:edges], hop.edges)
    assert bool((compactor.table == EMPTY).all())


@pytest.mark.parametrize(
    "seeds", [SEEDS, torch.tensor([3], dtype=torch.int32), NONE], ids=["mixed", "isolated", "none"]
)
@pytest.mark.parametrize("fanouts", [[2], [3, 2], [1, 5, 2]], ids=str)
def test_hops_with_compaction(fanouts, seeds):
    indptr, indices = random_csr(40)
    seeds = seeds % 40
    compactor, sampler = Compactor(40, torch.device("cpu"), 64, 4), CpuSampler(indptr, indices)
    small = partial(launch_sample, launch=SampleLaunch(16, 4))
    for batch in range(2):
        clock = make_clock(0, 4, batch)
        hops = sample_hops_triton(indptr, indices, seeds, fanouts, clock, compactor, edges=True, sample_hop=small)
        sampler.begin(seeds, clock)
        for hop, fanout in enumerate(fanouts):
            sample, found = sampler.hop(fanout, hop)
            rows, nodes, edges = (int(n) for n in (hops[hop].num_rows, hops[hop].num_nodes, hops[hop].indptr[-1]))
            assert torch.equal(hops[hop].nodes[:nodes], found.nodes)
            assert torch.equal(hops[hop].indptr[: rows + 1], sample.indptr)
            assert torch.equal(hops[hop].indices[:edges], found.indices)
            assert torch.equal(hops[hop].edges[:edges], sample.edges)
        assert bool((compactor.table == EMPTY).all())


CASES = [(1, torch.float32), (3, torch.float32), (100, torch.float32), (7, torch.bfloat16), (3, torch.int8)]


@pytest.mark.parametrize(("width", "dtype"), CASES)
def test_gather(width, dtype):
    x = (10 * torch.randn(50, width)).to(dtype)
    ids = torch.tensor([3, 3, 0, 49, 7], dtype=torch.int32)
    for table in (x, x[:, : max(1, width - 1)], x[1:], x[:, width // 2 :]):
        for launch in (None, GatherLaunch(2, 16), GatherLaunch(4, 32, aligned=True)):
            assert torch.equal(gather_rows_triton(table, ids % 49, launch=launch), gather_rows_torch(table, ids % 49))
    out = torch.zeros(5, width, dtype=dtype)
    gather_rows_triton(x, ids, out, count=torch.tensor([2]), launch=GatherLaunch(2, 16))
    assert torch.equal(out[:2], x[[3, 3]])
    assert not out[2:].any()


@pytest.mark.parametrize("width", [1, 5, 100])
def test_gather_with_a_cache(width):
    x, held = torch.randn(50, width), torch.tensor([7, 3, 49])
    slots, hits = torch.full((50,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    slots[held] = torch.arange(3, dtype=torch.int32)
    cache = x[held] + 100  # so that the result tells where a row came from
    ids = torch.tensor([3, 3, 0, 49, 8], dtype=torch.int32)
    for launch in (GatherLaunch(2, 16), GatherLaunch(4, 32, aligned=True, programs=1)):
        rows = gather_rows_triton(x, ids, cached=(cache, slots, hits), launch=launch)
        assert torch.equal(rows, x[ids.long()] + 100 * torch.tensor([1, 1, 0, 1, 0])[:, None])
    assert hits.tolist() == [6]
    out = torch.zeros(5, width)
    gather_rows_triton(x, ids, out, count=torch.tensor([2]), cached=(cache, slots, hits), launch=GatherLaunch(2, 16))
    assert torch.equal(out[:2], cache[[1, 1]])
    assert not out[2:].any()
    assert hits.tolist() == [8]


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_few_programs_gather_all_rows(programs):
    x, ids = torch.randn(50, 20), torch.arange(49, dtype=torch.int32)
    launch = GatherLaunch(4, 32, programs=programs)
    assert torch.equal(gather_rows_triton(x, ids, launch=launch), x[:49])
    out = torch.zeros(49, 20)
    gather_rows_triton(x, ids, out, count=torch.tensor([30]), launch=launch)
    assert torch.equal(out, torch.where(torch.arange(49)[:, None] < 30, x[:49], 0.0))


@pytest.mark.parametrize(
    ("launch", "reference"),
    [(partial(launch_sample, launch=SampleLaunch(8, 4)), sample_torch), (launch_reservoir, sample_reservoir_torch)],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lists_on_the_device(dtype, launch, reference):
    """Picks are those without a cache; they are read from the cache where it has the list."""
    indptr, indices = random_csr(dtype=dtype)
    held = torch.tensor([0, 7, 31, 58])
    lists = [indices[indptr[node] : indptr[node + 1]] for node in held.tolist()]
    starts = torch.full((indptr.numel() - 1,), -1, dtype=torch.int32)
    starts[held] = torch.tensor([0, *(len(one) for one in lists[:-1])]).cumsum(0).to(torch.int32)
    everyone = torch.tensor([SEEDS.numel()], dtype=torch.int32)
    for shift in (0, 1000):
        cached = CachedLists(torch.cat(lists) + shift, starts, torch.zeros(2, dtype=torch.int64))
        mine = launch(indptr, indices, SEEDS, everyone, 5, CLOCK, 1, cached=cached)
        plain = reference(indptr, indices, SEEDS, 5, CLOCK, 1)
        assert torch.equal(mine.indptr, plain.indptr)
        here = torch.isin(SEEDS.long(), held).repeat_interleave(plain.indptr.diff().long())
        assert torch.equal(mine.trimmed().sources, plain.sources + shift * here)
        assert cached.read.tolist() == [SEEDS.numel(), int(torch.isin(SEEDS.long(), held).sum())]


@pytest.mark.parametrize("cuts", [(0, 25, 60), (0, 25, 25, 40, 60), (0, 60, 60)])
def test_lists_in_the_memory_of_several_ranks(cuts):
    indptr, indices = random_csr()
    bounds = indptr[list(cuts)].tolist()
    held = [indices[low:high].clone() for low, high in pairwise(bounds)]
    for parts in (held, [part.clone() for part in reversed(held)][::-1]):  # in any order of their addresses
        lists = spread_lists(parts, bounds, indptr)
        compactor = Compactor(60, torch.device("cpu"), block=8)
        mine = sample_hops_triton(indptr, lists.indices, SEEDS, [5, 3], CLOCK, compactor, edges=True, cached=lists)
        compactor = Compactor(60, torch.device("cpu"), block=8)
        plain = sample_hops_triton(indptr, indices, SEEDS, [5, 3], CLOCK, compactor, edges=True)
        for hop, expected in zip(mine, plain, strict=True):
            edges, nodes = int(expected.indptr[-1]), int(expected.num_nodes)
            assert torch.equal(hop.indptr, expected.indptr)
            assert torch.equal(hop.indices[:edges], expected.indices[:edges])
            assert torch.equal(hop.edges[:edges], expected.edges[:edges])
            assert torch.equal(hop.nodes[:nodes], expected.nodes[:nodes])
