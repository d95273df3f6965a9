"""Forms of a small matrix on a GPU are derived from its copy on the host: the same arrays."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import tiny_graph
from weft.ops.csr.adjacency import Adjacency, row_sums
from weft.ops.csr.worklist import WorkList, build_worklist, worklist_by_length


def matrix(symmetric: bool, weighted: bool, device: str = "cpu") -> Adjacency:
    draw = torch.Generator().manual_seed(3)
    dense = (torch.rand(40, 40, generator=draw) < 0.2).float() * torch.rand(40, 40, generator=draw)
    dense = dense + dense.t() if symmetric else dense
    rows, cols = dense.nonzero(as_tuple=True)
    indptr = torch.nn.functional.pad(rows.bincount(minlength=40).cumsum(0), (1, 0)).int()
    indices, weight = cols.int(), dense[rows, cols] if weighted else None
    return Adjacency(indptr, indices, 40, weight=weight, symmetric=symmetric).to(device)


def forms(adj: Adjacency) -> dict[str, Adjacency]:
    looped = adj.with_self_loops()
    found = {"looped": looped, "gcn": adj.gcn(), "mean": adj.mean(), "back": adj.transposed()}
    return {**found, "looped back": looped.transposed(), "gcn back": adj.gcn().transposed()}


def arrays(adj: Adjacency) -> list[torch.Tensor]:
    factors = (adj.weight, adj.row_scale, adj.col_scale, adj.perm)
    work: WorkList = worklist_by_length(adj)
    return [adj.indptr, adj.indices, adj.rows(), *(one for one in factors if one is not None), *work.tensors()]


def check_same(mine: Adjacency, other: Adjacency) -> None:
    for (name, one), two in zip(forms(mine).items(), forms(other).values(), strict=True):
        for left, right in zip(arrays(one), arrays(two), strict=True):
            assert left.dtype == right.dtype, name
            # A GPU adds the weights of a row in another order than a CPU.
            assert torch.allclose(left, right, rtol=1e-6) if left.is_floating_point() else torch.equal(left, right), (
                name
            )
        assert one.symmetric == two.symmetric
        assert one.num_cols == two.num_cols


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_arrays_are_those_derived_in_place(symmetric, weighted, monkeypatch):
    mine = matrix(symmetric, weighted)
    mine.on_host = mine.structure_on_host = matrix(symmetric, weighted)
    monkeypatch.setattr(mine, "_loop_arrays", None)  # never called in place
    check_same(mine, matrix(symmetric, weighted))


def test_a_transpose_with_other_weights_keeps_its_own():
    mine, other = matrix(False, False), matrix(False, False)
    mine.on_host = mine.structure_on_host = matrix(False, False)
    weight = torch.rand(mine.num_edges, generator=torch.Generator().manual_seed(5))
    found, expected = (adj.scaled(weight=weight).transposed() for adj in (mine, other))
    assert torch.equal(found.with_self_loops().weight, expected.with_self_loops().weight)
    assert torch.equal(found.inverse_root_degrees(), expected.inverse_root_degrees())


def test_a_matrix_that_stays_where_it_is_has_no_copy():
    adj = tiny_graph().adj
    assert adj.moved("cpu") is adj
    assert adj.on_host is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_same_on_a_gpu(symmetric, weighted):
    mine, other = matrix(symmetric, weighted).moved("cuda"), matrix(symmetric, weighted, "cuda")
    assert mine.on_host is not None
    assert other.on_host is None
    check_same(mine, other)
    large = matrix(symmetric, weighted)
    assert build_worklist(large.indptr, 16, 256).to(torch.device("cuda")).light_row.is_cuda


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_are_added_up_the_same_way_every_time():
    draw = torch.Generator().manual_seed(1)
    weight = torch.rand(500_000, generator=draw).cuda()
    indptr = torch.tensor([0, 1, 1, 400_000, 400_017, 500_000], dtype=torch.int32).cuda()
    first = row_sums(weight, indptr)
    assert all(torch.equal(first, row_sums(weight, indptr)) for _ in range(20))
    assert first[1] == 0
    assert torch.allclose(first, row_sums(weight.cpu(), indptr.cpu()).cuda(), rtol=1e-4)
