"""Both attentions: every kernel against its torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.graphs_for_tests import empty, from_pairs
from tests.ops.interpreted.packed import assert_same, both_csr, numbers, small
from weft.ops.attention import gat_triton as attention_backward
from weft.ops.attention import gat_triton as attention_forward
from weft.ops.attention.gat import (
    attention_backward_torch,
    attention_forward_torch,
    attention_row_gradient_torch,
    take_apart,
)
from weft.ops.attention.gat_gather_triton import GatherLaunch, choose_gather_launch
from weft.ops.attention.gat_triton import (
    attention_backward_triton,
    attention_forward_triton,
    attention_row_gradient_triton,
)
from weft.ops.attention.gat_two_pass_triton import suits_one_pass
from weft.ops.attention.gatv2 import (
    attention_v2_backward_launches,
    attention_v2_backward_torch,
    attention_v2_forward_torch,
    attention_v2_forward_triton,
)
from weft.ops.attention.mean_heads import mean_heads_torch, mean_heads_triton
from weft.ops.csr.packed import pack_csr, unpack_csr
from weft.ops.csr.worklist import build_worklist

CASES = [  # leading dimensions, heads, width, dropout, type
    ((), 1, 1, False, torch.float32),
    ((), 3, 5, True, torch.float32),
    ((), 8, 8, False, torch.float32),
    ((), 1, 65, True, torch.float64),
    ((2,), 2, 17, True, torch.bfloat16),
    ((2, 2), 1, 3, True, torch.float32),
    ((), 4, 4, True, torch.float16),
]


def of_rows_with_edges(results, csr):
    """Without the last one's rows that have no edge: nothing reads the logarithm of their empty sum."""
    *others, log_sum = results
    return *others, log_sum[..., csr.indptr.diff() > 0, :]


def dropout_of(lead, active):
    """``(rate, clock)``, each task with its own."""
    if not active:
        return None, None
    count = torch.Size(lead).numel()
    clock = torch.arange(2 * count).reshape(*lead, 2)
    return (torch.arange(1, count + 1) / 8).reshape(lead), clock


TILES = [  # several tiles of heads: one of them not full, none idle; wide heads
    ((), 5, 16, True, torch.float32),
    ((2,), 6, 16, False, torch.bfloat16),
    ((), 2, 40, True, torch.float32),
    ((), 2, 130, False, torch.float32),
]


def test_which_passes_suit():
    few, many = 10_000_000, 500_000_000  # edges times heads: arxiv's, products'
    assert suits_one_pass(torch.float32, 16, few)
    assert suits_one_pass(torch.float64, 32, 1000)
    assert not any(suits_one_pass(torch.float32, width, few) for width in (40, 47, 64))
    assert suits_one_pass(torch.float32, 47, many)
    assert not suits_one_pass(torch.bfloat16, 16, many)


@pytest.mark.parametrize(("lead", "heads", "width", "active", "dtype"), [*CASES, *TILES])
def test_attention(lead, heads, width, active, dtype, passes):
    adj = small()
    csr, back = both_csr(adj)
    x = numbers(*lead, adj.num_cols, heads, width, dtype=dtype)
    a_src, a_dst = (
        numbers(*lead, adj.num_cols, heads, dtype=dtype, seed=1),
        numbers(*lead, adj.num_rows, heads, dtype=dtype, seed=2),
    )
    rate, clock = dropout_of(lead, active)
    forward = attention_forward_triton(x, a_src, a_dst, 0.2, rate, clock, 7, csr, True)
    expected = attention_forward_torch(x, a_src, a_dst, 0.2, rate, clock, 7, csr)
    assert_same(of_rows_with_edges(forward, csr), of_rows_with_edges(expected, csr), dtype)
    evaluated = attention_forward_triton(x, a_src, a_dst, 0.2, rate, clock, 7, csr, False)
    assert_same(evaluated[0], expected[0], dtype)
    grad = numbers(*lead, adj.num_rows, heads, width, dtype=dtype, seed=3)
    out, out_plus, alpha_plus, log_sum = expected
    rows = (grad, out, out_plus, alpha_plus, a_dst, log_sum, 0.2)
    stats, grad_a_dst = attention_row_gradient_torch(*rows)
    assert_same(attention_row_gradient_triton(*rows), (stats, grad_a_dst), dtype)
    mine = attention_backward_triton(grad, x, a_src, stats, 0.2, rate, clock, 7, back)
    assert_same(mine, attention_backward_torch(grad, x, a_src, stats, 0.2, rate, clock, 7, csr), dtype)


def light(adj):
    """``adj`` packed with a lane per row, whatever its length."""
    csr = unpack_csr(pack_csr(adj, rows=True, perm=True))
    return replace(csr, work=build_worklist(csr.indptr, 64, 128))


@pytest.mark.parametrize("degree", range(1, 8))
def test_the_first_row_reaches_its_neighbours_alone(degree, passes):
    """Lanes that are through with their edges have column 0 at hand: that must not be read, whatever it is times."""
    rows = torch.arange(9).repeat_interleave(degree)
    cols = 1 + (rows + torch.arange(degree).repeat(9)) % 8
    adj = from_pairs(rows, cols, 9, 9)  # nothing from node 0
    csr, back = light(adj), light(adj.transposed())
    x, a_src, a_dst = numbers(9, 2, 16), numbers(9, 2, seed=1), numbers(9, 2, seed=2)
    out, out_plus, alpha_plus, log_sum = attention_forward_torch(x, a_src, a_dst, 0.2, None, None, 7, csr)
    x[0] = a_src[0] = torch.nan
    mine, *_ = attention_forward_triton(x, a_src, a_dst, 0.2, None, None, 7, csr, True)
    assert_same(mine, out, torch.float32)
    grad = numbers(9, 2, 16, seed=3)
    stats, _ = attention_row_gradient_torch(grad, out, out_plus, alpha_plus, a_dst, log_sum, 0.2)
    true, *_ = attention_backward_torch(grad, x, a_src, stats, 0.2, None, None, 7, csr)
    found, *_ = attention_backward_triton(grad, x, a_src, stats, 0.2, None, None, 7, back)
    assert_same(found[1:], true[1:], torch.float32)


@pytest.mark.parametrize("launch", [GatherLaunch(4, 1, 8), GatherLaunch(1, 4, 16, 2)], ids=str)
def test_other_tiles_and_wide_offsets(launch, monkeypatch):
    for module in (attention_forward, attention_backward):
        monkeypatch.setattr(module, "wide_offsets", lambda *sizes: True)
    adj = small()
    csr, back = both_csr(adj)
    x, a_src, a_dst = numbers(2, 9, 3, 7), numbers(2, 9, 3, seed=1), numbers(2, 11, 3, seed=2)
    random = (*dropout_of((2,), True), 7)
    forward = attention_forward_triton(x, a_src, a_dst, 0.2, *random, csr, True, launch)
    expected = attention_forward_torch(x, a_src, a_dst, 0.2, *random, csr)
    assert_same(of_rows_with_edges(forward, csr), of_rows_with_edges(expected, csr), torch.float32)
    grad, (out, out_plus, alpha_plus, log_sum) = numbers(2, 11, 3, 7, seed=3), expected
    stats, _ = attention_row_gradient_torch(grad, out, out_plus, alpha_plus, a_dst, log_sum, 0.2)
    mine = attention_backward_triton(grad, x, a_src, stats, 0.2, *random, back, launch)
    assert_same(mine, attention_backward_torch(grad, x, a_src, stats, 0.2, *random, csr), torch.float32)


def test_a_stack_has_the_bits_of_each_task(passes):
    adj = small()
    csr, back = both_csr(adj)
    x, a_src, a_dst = numbers(2, 9, 3, 7), numbers(2, 9, 3, seed=1), numbers(2, 11, 3, seed=2)
    rate, clock = dropout_of((2,), True)
    grad, stats = numbers(2, 11, 3, 7, seed=3), numbers(2, 11, 3, 3, seed=4)
    out = attention_forward_triton(x, a_src, a_dst, 0.2, rate, clock, 7, csr, True)
    grads = attention_backward_triton(grad, x, a_src, stats, 0.2, rate, clock, 7, back)
    for t in range(2):
        own = rate[t], clock[t], 7
        alone = attention_forward_triton(x[t], a_src[t], a_dst[t], 0.2, *own, csr, True)
        assert all(torch.equal(all_of[t], one) for all_of, one in zip(out, alone, strict=True))
        alone = attention_backward_triton(grad[t], x[t], a_src[t], stats[t], 0.2, *own, back)
        assert all(torch.equal(all_of[t], one) for all_of, one in zip(grads, alone, strict=True))


@pytest.mark.parametrize(
    ("heads", "width", "shared", "launch"),
    [
        (4, 16, False, (2, 4, 16, 1)),
        (8, 8, False, (2, 8, 8, 1)),
        (3, 16, False, (2, 4, 16, 1)),
        (6, 16, False, (4, 2, 16, 1)),
        (1, 40, False, (2, 1, 64, 1)),
        (1, 3, False, (8, 1, 4, 1)),
        (2, 256, False, (2, 1, 256, 4)),
        (4, 40, True, (2, 4, 64, 2)),
    ],
)
def test_tiles_of_a_gather(heads, width, shared, launch):
    assert choose_gather_launch(heads, width, shared) == GatherLaunch(*launch)


@pytest.mark.parametrize("shared", [False, True], ids=["own gradient", "one gradient for all heads"])
def test_row_gradient(shared):
    rows, heads, width = 5, 3, 20
    grad = numbers(rows, 1 if shared else heads, width, seed=3).expand(rows, heads, width)
    out, out_plus = numbers(rows, heads, width, seed=4), numbers(rows, heads, width, seed=5)
    alpha_plus, a_dst, log_sum = (numbers(rows, heads, seed=seed) for seed in (6, 7, 8))
    given = (grad, out, out_plus, alpha_plus, a_dst, log_sum, 0.2)
    expected = attention_row_gradient_torch(*given)
    assert_same(attention_row_gradient_triton(*given), expected, torch.float32)


@pytest.mark.parametrize(("lead", "heads", "width", "active", "dtype"), CASES)
def test_attention_v2(lead, heads, width, active, dtype):
    adj = small()
    csr, back = both_csr(adj)
    x_src = numbers(*lead, adj.num_cols, heads, width, dtype=dtype) / 2
    x_dst = numbers(*lead, adj.num_rows, heads, width, dtype=dtype, seed=1) / 2
    att = numbers(*lead, heads, width, dtype=dtype, seed=2)
    rate, clock = dropout_of(lead, active)
    expected = attention_v2_forward_torch(x_src, x_dst, att, 0.2, rate, clock, 7, csr)
    forward = attention_v2_forward_triton(x_src, x_dst, att, 0.2, rate, clock, 7, csr)
    assert_same(of_rows_with_edges(forward, csr), of_rows_with_edges(expected, csr), dtype)
    grad = numbers(*lead, adj.num_rows, heads, width, dtype=dtype, seed=3)
    out, log_sum = expected
    delta = (grad.to(log_sum.dtype) * out.to(log_sum.dtype)).sum(-1)
    given = (grad, x_src, x_dst, att, delta, log_sum, 0.2, rate, clock, 7, csr)
    size = torch.float32 if dtype == torch.float64 else dtype  # the slope is a float32 number
    assert_same(attention_v2_backward_launches(*given, back)(), attention_v2_backward_torch(*given), size)


def test_tasks_may_share_att():
    adj = small()
    csr, back = both_csr(adj)
    x_src, x_dst, att = numbers(2, adj.num_cols, 2, 3), numbers(2, adj.num_rows, 2, 3, seed=1), numbers(2, 3, seed=2)
    expected = attention_v2_forward_torch(x_src, x_dst, att, 0.2, None, None, 0, csr)
    forward = attention_v2_forward_triton(x_src, x_dst, att, 0.2, None, None, 0, csr)
    assert_same(of_rows_with_edges(forward, csr), of_rows_with_edges(expected, csr), torch.float32)
    given = (numbers(2, adj.num_rows, 2, 3, seed=3), x_src, x_dst, att, numbers(2, adj.num_rows, 2), expected[1])
    given = (*given, 0.2, None, None, 0, csr)
    assert_same(attention_v2_backward_launches(*given, back)(), attention_v2_backward_torch(*given), torch.float32)


def test_attention_without_edges(passes):
    adj = empty()
    csr, back = both_csr(adj)
    x, a = numbers(5, 2, 3), numbers(5, 2)
    mine = attention_forward_triton(x, a, a, 0.2, None, None, 0, csr, True)
    assert_same(mine[:3], attention_forward_torch(x, a, a, 0.2, None, None, 0, csr)[:3], x.dtype)
    stats = torch.zeros(5, 2, 3)
    grads = attention_backward_triton(x, x, a, stats, 0.2, None, None, 0, back)
    assert_same(grads, (torch.zeros_like(x), torch.zeros_like(a)), x.dtype)


def test_attention_of_large_scores(passes):
    adj = small()
    csr, _ = both_csr(adj)
    x, a_src, a_dst = numbers(adj.num_cols, 2, 3), 1e3 * numbers(adj.num_cols, 2), 1e3 * numbers(adj.num_rows, 2)
    mine = attention_forward_triton(x, a_src, a_dst, 0.2, None, None, 0, csr, True)
    expected = attention_forward_torch(x, a_src, a_dst, 0.2, None, None, 0, csr)
    assert_same(of_rows_with_edges(mine, csr), of_rows_with_edges(expected, csr), torch.float32)


PARTS = [  # any three of: which passes, tasks, whose gradient, size; the interpreter takes seconds for each
    (1, (), False, 5, 70),
    (1, (), True, 3, 5),
    (1, (2,), False, 3, 5),
    (1, (2,), True, 5, 70),
    (2, (), False, 3, 5),
    (2, (), True, 5, 70),
    (2, (2,), False, 5, 70),
    (2, (2,), True, 3, 5),
]


@pytest.mark.parametrize(("passes", "lead", "shared", "heads", "width"), PARTS, indirect=["passes"])
def test_parts_of_one_matrix(lead, shared, heads, width, passes):
    """``shared``: one gradient for all heads."""
    adj = small(9, 9)
    csr, back = both_csr(adj)
    packed = numbers(*lead, adj.num_rows, heads * (width + 2))
    x, a_src, a_dst = take_apart(packed, heads)
    rate, clock = dropout_of(lead, True)
    forward = attention_forward_triton(x, a_src, a_dst, 0.2, rate, clock, 7, csr, True)
    expected = attention_forward_torch(x, a_src, a_dst, 0.2, rate, clock, 7, csr)
    assert_same(of_rows_with_edges(forward, csr), of_rows_with_edges(expected, csr), torch.float32)
    grad = numbers(*lead, adj.num_rows, 1 if shared else heads, width, seed=3).expand(*x.shape)
    out, out_plus, alpha_plus, log_sum = expected
    result = torch.full_like(packed, torch.nan)
    into_x, into_src, into_dst = take_apart(result, heads)
    rows = (grad, out, out_plus, alpha_plus, a_dst, log_sum, 0.2)
    stats, grad_a_dst = attention_row_gradient_torch(*rows)
    attention_row_gradient_triton(*rows, into=into_dst)
    attention_backward_triton(grad, x, a_src, stats, 0.2, rate, clock, 7, back, into=(into_x, into_src))
    grad_x, grad_a_src = attention_backward_torch(grad, x, a_src, stats, 0.2, rate, clock, 7, csr)
    assert_same((into_x, into_src, into_dst), (grad_x, grad_a_src, grad_a_dst), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lead", "heads", "width"), [((), 1, 1), ((2,), 3, 40), ((2, 2), 2, 300)])
def test_mean_of_heads(lead, heads, width, dtype):
    x = numbers(*lead, 7, heads, width, dtype=dtype)
    for bias in (None, numbers(width, dtype=dtype, seed=1), numbers(*lead, width, dtype=dtype, seed=1)):
        assert_same(mean_heads_triton(x, bias), mean_heads_torch(x, bias), dtype)
