"""Rows in another order: every kernel gives the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.interpreted.packed import both_csr, numbers, small
from weft.ops.attention.gat_triton import attention_backward_triton, attention_forward_triton
from weft.ops.attention.gatv2 import attention_v2_backward_launches, attention_v2_forward_triton
from weft.ops.csr.worklist import build_worklist
from weft.ops.sparse.edge_softmax import edge_softmax_triton
from weft.ops.sparse.sddmm import sddmm_triton
from weft.ops.sparse.spmm import spmm_triton
from weft.ops.sparse.spmm_max import spmm_max_backward_triton, spmm_max_triton
from weft.weave.merged_launch import OpCall, merged_call_triton

SIZE, LIGHT, CHUNK = 23, 4, 8


@pytest.fixture(scope="module")
def orders():
    """``(forward, backward)`` with rows by length, and the same by cluster."""
    random = torch.Generator().manual_seed(3)
    cluster = torch.randint(0, 4, (SIZE,), generator=random, dtype=torch.int32)
    by_length, by_cluster = (
        [replace(csr, work=build_worklist(csr.indptr, LIGHT, CHUNK, given)) for csr in both_csr(small(SIZE, SIZE))]
        for given in (None, cluster)
    )
    for mine, theirs in zip(by_length, by_cluster, strict=True):
        assert mine.work.hub_row.numel()
        assert not torch.equal(mine.work.light_row, theirs.work.light_row)
        assert not torch.equal(mine.work.heavy_row, theirs.work.heavy_row)
    return by_length, by_cluster


def assert_same_bits(results) -> None:
    """Of two tuples of tensors."""
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_sums_and_maxima(orders):
    x, grad = numbers(2, SIZE, 17), numbers(2, SIZE, 17, seed=1)
    weight = numbers(orders[0][0].num_edges, seed=2)
    scale = numbers(SIZE, seed=3)

    def all_of(csr, back):
        out, winner = spmm_max_triton(x, weight, csr)
        backward = spmm_max_backward_triton(grad, winner, weight, back)
        return spmm_triton(x, None, scale, scale, csr), spmm_triton(grad, weight, scale, None, back), out, backward

    assert_same_bits([all_of(*order) for order in orders])


def test_sums_and_maxima_in_one_launch(orders):
    x, other = numbers(2, SIZE, 3), numbers(SIZE, 5, seed=1)

    def all_of(csr, back):
        packed = [csr.indptr, csr.indices, csr.perm, csr.row_of_edge, *csr.work.tensors()]
        calls = [OpCall("spmm", (x, None, None, None, packed, [], None)), OpCall("spmm_max", (other, None, packed, []))]
        return [outputs[0] for outputs in merged_call_triton(calls)]

    assert_same_bits([all_of(*order) for order in orders])


def test_edges(orders):
    a, scores = numbers(SIZE, 6), numbers(orders[0][0].num_edges, 2, seed=1)
    assert_same_bits([(sddmm_triton(a, a, 2, csr), edge_softmax_triton(scores, csr)) for csr, _ in orders])


@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_attention(orders, spread):
    heads, width = 2, 5
    x, grad = numbers(2, SIZE, heads, width), numbers(2, SIZE, heads, width, seed=1)
    a_src, a_dst = spread * numbers(2, SIZE, heads, seed=2), numbers(2, SIZE, heads, seed=3)
    stats = numbers(2, SIZE, 3, heads, seed=4)
    rate, clock = torch.tensor([0.25, 0.5]), torch.tensor([[1, 2], [3, 4]])
    some = orders[0][0].indptr.diff() > 0  # nothing reads the logarithm of an empty sum

    def all_of(csr, back):
        *rows, log_sum = attention_forward_triton(x, a_src, a_dst, 0.2, rate, clock, 7, csr, True)
        backward = attention_backward_triton(grad, x, numbers(2, SIZE, heads), stats, 0.2, rate, clock, 7, back)
        return *rows, log_sum[..., some, :], *backward

    assert_same_bits([all_of(*order) for order in orders])


def test_attention_v2(orders):
    """Its forward pass is always by length: the gradient of att is a sum over all rows."""
    (csr, back), (_, other_back) = orders
    x, grad = numbers(SIZE, 2, 3), numbers(SIZE, 2, 3, seed=1)
    att = numbers(2, 3, seed=2)
    out, log_sum = attention_v2_forward_triton(x, x, att, 0.2, None, None, 0, csr)
    given = (grad, x, x, att, (grad * out).sum(-1), log_sum, 0.2, None, None, 0, csr)
    assert_same_bits([attention_v2_backward_launches(*given, some_back)() for some_back in (back, other_back)])
