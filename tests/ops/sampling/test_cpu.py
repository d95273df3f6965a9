"""The compiled sampler: equal to the reference bit for bit with any number of threads; batches never share memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.sampling.graphs import CLOCK, SEEDS, assert_same_sample, random_csr, sample_cpu
from weft.core.errors import GraphError, InputError
from weft.ops.sampling import cpu
from weft.ops.sampling.cpu import ArrayPool, CpuSampler, transpose_cpu
from weft.ops.sampling.reference import check_seeds, make_clock, relabel_torch, sample_torch


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request, monkeypatch):
    monkeypatch.setattr(cpu, "ROWS_OF_A_SHARE", 2)
    return request.param


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("fanout", [1, 2, 15, 40, 58, 59, 60, 100, -1])
@pytest.mark.parametrize("kind", ["uniform", "replace", "weighted"])
def test_equals_the_reference(kind, fanout, dtype, threads):
    indptr, indices = random_csr(dtype=dtype)
    weight = torch.rand(indices.numel(), generator=torch.Generator().manual_seed(0))
    weight[::7] = 0
    options = {"replace": {"replace": True}, "weighted": {"weight": weight}}.get(kind, {})
    mine, found = sample_cpu(indptr, indices, SEEDS, fanout, CLOCK, 1, threads=threads, **options)
    theirs = sample_torch(indptr, indices, SEEDS, fanout, CLOCK, 1, **options)
    assert_same_sample(mine, theirs)
    expected = relabel_torch(SEEDS, theirs.sources)
    assert torch.equal(found.nodes, expected.nodes)
    assert torch.equal(found.indices, expected.indices)


def test_a_node_is_sampled_alike_in_any_company():
    indptr, indices = random_csr()
    alone, _ = sample_cpu(indptr, indices, torch.tensor([4]), 5, CLOCK)
    together, _ = sample_cpu(indptr, indices, torch.tensor([9, 4, 1, 4]), 5, CLOCK)
    begin = together.indptr
    assert torch.equal(together.sources[begin[1] : begin[2]], alone.sources)
    assert torch.equal(together.sources[begin[3] :], alone.sources)


def test_seeds_come_first_then_new_nodes_by_appearance():
    indptr, indices = torch.tensor([0, 2, 2, 5]), torch.tensor([2, 1, 1, 0, 2], dtype=torch.int32)
    sample, found = sample_cpu(indptr, indices, torch.tensor([2, 0, 2]), -1, CLOCK)
    assert found.nodes.tolist() == [2, 0, 2, 1]
    assert sample.indptr.tolist() == [0, 3, 5, 8]
    assert found.indices.tolist() == [3, 1, 0, 0, 3, 3, 1, 0]


@pytest.mark.parametrize("seeds", [[], [3], [3, 3]])
def test_nothing_to_sample(seeds):
    indptr, indices = random_csr()
    sample, found = sample_cpu(indptr, indices, torch.tensor(seeds, dtype=torch.int32), 5, CLOCK)
    assert sample.indptr.tolist() == [0] * (len(seeds) + 1)
    assert sample.sources.numel() == 0
    assert found.nodes.tolist() == seeds


def test_a_graph_without_edges():
    sample, found = sample_cpu(
        torch.zeros(5, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.arange(4), 3, CLOCK
    )
    assert sample.sources.numel() == 0
    assert found.nodes.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("seeds", "message"), [
    ([0, 60], "seed 60 at position 1 must be a node id from 0 to 59"),
    ([-1], "seed -1 at position 0"),
    ([0.5], "seeds must be a vector of node ids"),
    ([[1]], "shape \\[1, 1\\]"),
])  # fmt: skip
def test_seeds_that_are_no_nodes(seeds, message):
    with pytest.raises(GraphError, match=message):
        check_seeds(torch.tensor(seeds), 60)


@pytest.mark.parametrize("fanout", [0, -2])
def test_fanouts_that_make_no_sense(fanout):
    with pytest.raises(InputError, match=f"fan-out {fanout} must be at least 1"):
        sample_cpu(*random_csr(), SEEDS, fanout, CLOCK)


def test_weights_with_replacement_are_refused():
    indptr, indices = random_csr()
    with pytest.raises(InputError, match="without replacement"):
        sample_cpu(indptr, indices, SEEDS, 2, CLOCK, replace=True, weight=torch.ones(indices.numel()))


def test_steady_batches_allocate_nothing_and_share_nothing():
    indptr, indices = random_csr(500, 40)
    sampler = CpuSampler(indptr, indices)

    def batch(number):
        sampler.begin(torch.arange(20, dtype=torch.int32), make_clock(0, 0, number))
        return [sampler.hop(fanout, hop) for hop, fanout in enumerate((4, 3))]

    kept, copies = [], []
    for number in range(4):
        kept.append(batch(number))
        copies.append([(s.indptr.clone(), s.edges.clone(), r.nodes.clone(), r.indices.clone()) for s, r in kept[-1]])
    for held, copied in zip(kept, copies, strict=True):
        for (sample, found), before in zip(held, copied, strict=True):
            after = sample.indptr, sample.edges, found.nodes, found.indices
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    del kept, held, sample, found, after
    made = sampler.pool.made
    for number in range(20):
        batch(number)
    assert sampler.pool.made == made


def test_an_array_is_handed_out_once_while_it_is_used():
    pool = ArrayPool()
    first = torch.from_numpy(pool.take(10, np.int32)[:5])
    second = torch.from_numpy(pool.take(10, np.int32)[:5])
    assert first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    view = first[2:]
    del first
    assert torch.from_numpy(pool.take(10, np.int32)).data_ptr() not in (address, second.data_ptr())
    del view
    assert torch.from_numpy(pool.take(10, np.int32)).data_ptr() == address


def test_the_table_starts_again_when_its_stamps_run_out(monkeypatch):
    monkeypatch.setattr(cpu, "MOST_STAMP", 2)
    indptr, indices = random_csr()
    sampler = CpuSampler(indptr, indices)
    for number in range(5):
        clock = make_clock(0, 0, number)
        sampler.begin(SEEDS, clock)
        _, found = sampler.hop(3, 0)
        assert torch.equal(found.nodes, sample_cpu(indptr, indices, SEEDS, 3, clock)[1].nodes)


@pytest.mark.parametrize("shape", [(0, 4), (3, 1), (40, 60)])
def test_transpose_is_a_stable_sort(shape):
    rows, cols = shape
    random = torch.Generator().manual_seed(3)
    degree = torch.randint(0, 7, (rows,), generator=random)
    indptr = torch.zeros(rows + 1, dtype=torch.int32)
    indptr[1:] = degree.cumsum(0)
    indices = torch.randint(0, cols, (int(indptr[-1]),), generator=random, dtype=torch.int32)
    back, back_rows, perm = transpose_cpu(indptr, indices, cols)
    order = torch.sort(indices, stable=True).indices
    assert torch.equal(perm.long(), order)
    assert torch.equal(back.diff(), torch.bincount(indices, minlength=cols).to(torch.int32))
    assert torch.equal(back_rows.long(), torch.repeat_interleave(torch.arange(rows), degree)[order])
