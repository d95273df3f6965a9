"""spmm, spmm_max, sddmm and edge_softmax: every kernel against its torch reference."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import empty, no_rows
from tests.ops.interpreted.packed import CHUNK, LIGHT, assert_same, both_csr, numbers, small
from weft.ops.sparse.edge_softmax import (
    edge_softmax_backward_torch,
    edge_softmax_torch,
    edge_softmax_triton,
)
from weft.ops.sparse.sddmm import sddmm_torch, sddmm_triton
from weft.ops.sparse.spmm import SpmmLaunch, spmm_torch, spmm_triton
from weft.ops.sparse.spmm_max import spmm_max_backward_torch, spmm_max_backward_triton, spmm_max_torch, spmm_max_triton

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def test_the_graph_has_every_kind_of_row():
    for csr in both_csr(small()):
        work, degrees = csr.work, csr.indptr.diff()
        assert work.hub_row.numel()
        assert work.hub_of_partial.numel() > work.hub_row.numel()
        assert ((degrees > LIGHT) & (degrees <= CHUNK)).any()
        assert work.light_row.numel()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 17])
def test_spmm(width, dtype):
    adj = small()
    csr, _ = both_csr(adj)
    x = numbers(adj.num_cols, width, dtype=dtype)
    assert_same(spmm_triton(x, None, None, None, csr), spmm_torch(x, None, None, None, csr), dtype)


@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=str)
def test_spmm_with_factors(lead):
    adj = small()
    csr, _ = both_csr(adj)
    x = numbers(*lead, adj.num_cols, 5)
    row_scale, col_scale = numbers(adj.num_rows, seed=1), numbers(adj.num_cols, seed=2)
    for weight in (numbers(adj.num_edges, seed=3), numbers(*lead, adj.num_edges, seed=4)):
        expected = spmm_torch(x, weight, row_scale, col_scale, csr)
        assert_same(spmm_triton(x, weight, row_scale, col_scale, csr), expected, x.dtype)
        assert_same(spmm_triton(x, weight, row_scale, None, csr), spmm_torch(x, weight, row_scale, None, csr), x.dtype)


def test_spmm_with_a_weight_of_the_outer_or_inner_tasks():
    adj = small()
    csr, _ = both_csr(adj)
    x = numbers(2, 3, adj.num_cols, 3)
    for weight in (numbers(2, 1, adj.num_edges), numbers(3, adj.num_edges)):
        assert_same(spmm_triton(x, weight, None, None, csr), spmm_torch(x, weight, None, None, csr), x.dtype)


@pytest.mark.parametrize("launch", [SpmmLaunch(4, 4, 16), SpmmLaunch(1, 2, 32, 1), SpmmLaunch(8, 16, 64, 2)], ids=str)
def test_spmm_under_other_launch_parameters(launch):
    adj = small()
    csr, _ = both_csr(adj)
    x = numbers(adj.num_cols, 35)
    assert_same(spmm_triton(x, None, None, None, csr, launch), spmm_torch(x, None, None, None, csr), x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_spmm_adds_to_what_is_there(dtype):
    """Light rows, heavy rows and hubs, each once; sums of half precision stay in single precision."""
    adj = small()
    csr, _ = both_csr(adj)
    x, scale = numbers(2, adj.num_cols, 5, dtype=dtype), numbers(adj.num_rows, seed=1)
    before = numbers(2, adj.num_rows, 5, seed=2)
    out = before.clone()
    found = spmm_triton(x, None, scale, None, csr, out=out, add=True)
    assert found.data_ptr() == out.data_ptr()
    assert_same(out, before + spmm_torch(x.float(), None, scale, None, csr), torch.float32)


@pytest.mark.parametrize("make", [empty, no_rows])
def test_graphs_without_edges(make):
    adj = make()
    csr, back = both_csr(adj)
    x = numbers(adj.num_cols, 3)
    assert_same(spmm_triton(x, None, None, None, csr), spmm_torch(x, None, None, None, csr), x.dtype)
    out, winner = spmm_max_triton(x, None, csr)
    assert_same((out, winner), spmm_max_torch(x, None, csr), x.dtype)
    assert_same(spmm_max_backward_triton(out, winner, None, back), torch.zeros_like(x), x.dtype)
    assert sddmm_triton(numbers(adj.num_rows, 2), numbers(adj.num_cols, 2), 1, csr).shape == (0, 1)
    assert edge_softmax_triton(numbers(0, 2), csr).shape == (0, 2)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("lead", "width"), [((), 17), ((2,), 3)])
def test_spmm_max(lead, width, dtype):
    adj = small()
    csr, back = both_csr(adj)
    x = numbers(*lead, adj.num_cols, width, dtype=dtype)
    for weight in (None, numbers(adj.num_edges, seed=1, dtype=dtype)):
        out, winner = spmm_max_triton(x, weight, csr)
        expected, expected_winner = spmm_max_torch(x, weight, csr)
        assert_same(out, expected, dtype)
        if weight is None:  # products may tie after rounding
            assert torch.equal(winner, expected_winner)
        grad = numbers(*lead, adj.num_rows, width, dtype=dtype, seed=2)
        mine = spmm_max_backward_triton(grad, winner, weight, back)
        assert_same(mine, spmm_max_backward_torch(grad, winner, weight, csr, adj.num_cols), dtype)


def test_spmm_max_ties_and_nan():
    adj = small()
    csr, _ = both_csr(adj)
    x = torch.zeros(adj.num_cols, 3)
    x[3, 1] = float("nan")
    x[:, 2] = -torch.inf
    out, winner = spmm_max_triton(x, None, csr)
    expected, expected_winner = spmm_max_torch(x, None, csr)
    assert_same(out, expected, torch.float32)
    assert torch.equal(winner, expected_winner)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("lead", "heads", "width"), [((), 1, 1), ((2,), 3, 5), ((), 1, 130)])
def test_sddmm(lead, heads, width, dtype):
    adj = small()
    csr, _ = both_csr(adj)
    a = numbers(*lead, adj.num_rows, heads * width, dtype=dtype)
    b = numbers(*lead, adj.num_cols, heads * width, dtype=dtype, seed=1)
    assert_same(sddmm_triton(a, b, heads, csr), sddmm_torch(a, b, heads, csr), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("lead", "heads"), [((), 1), ((), 3), ((2,), 4)])
def test_edge_softmax(lead, heads, dtype):
    adj = small()
    csr, _ = both_csr(adj)
    scores = 5 * numbers(*lead, adj.num_edges, heads, dtype=dtype)
    out = edge_softmax_triton(scores, csr)
    assert_same(out, edge_softmax_torch(scores, csr), dtype)
    grad = numbers(*lead, adj.num_edges, heads, dtype=dtype, seed=1)
    assert_same(edge_softmax_triton(out, csr, grad), edge_softmax_backward_torch(grad, out, csr), dtype)


def test_edge_softmax_of_large_and_odd_scores():
    adj = small()
    csr, _ = both_csr(adj)
    scores = 1e4 * numbers(adj.num_edges, 2)
    assert_same(edge_softmax_triton(scores, csr), edge_softmax_torch(scores, csr), torch.float32)
    scores = numbers(adj.num_edges, 2)
    scores[3, 0], scores[7, 1] = float("nan"), -torch.inf
    assert_same(edge_softmax_triton(scores, csr), edge_softmax_torch(scores, csr), torch.float32)
