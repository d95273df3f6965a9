"""graph_attention: GAT's attention, with and without dropout of its coefficients."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import leaky_relu

from tests.graphs_for_tests import mixed, neighbourhoods
from tests.ops.bits import row_mask_of
from tests.ops.comparing import assert_agrees, assert_near
from tests.ops.contract import OperatorContract
from weft.core.errors import InputError
from weft.ops import graph_attention

CLOCK, SITE = torch.tensor([11, 3]), 2


def plain_attention(adj, x, a_src, a_dst, mask=None, slope=0.2):
    rows = []
    for row, span, cols in neighbourhoods(adj):
        alpha = leaky_relu(a_src[..., cols, :] + a_dst[..., row : row + 1, :], slope).softmax(-2)
        alpha = alpha if mask is None else alpha * mask[..., span, :]
        rows.append((alpha[..., None] * x[..., cols, :, :]).sum(-3))
    return torch.stack(rows, -3) if rows else x.new_zeros(*x.shape[:-3], 0, *x.shape[-2:])


class TestAttention(OperatorContract):
    heads = 3

    def inputs(self, adj, width, lead, random):
        shapes = (adj.num_cols, self.heads, width), (adj.num_cols, self.heads), (adj.num_rows, self.heads)
        return [torch.randn(*lead, *shape, generator=random, dtype=torch.float64) for shape in shapes]

    def call(self, adj, x, a_src, a_dst):
        return graph_attention(adj, x, a_src, a_dst)

    def plain(self, adj, x, a_src, a_dst):
        return plain_attention(adj, x, a_src, a_dst)


class TestDroppedOut(TestAttention):
    def call(self, adj, x, a_src, a_dst):
        return graph_attention(adj, x, a_src, a_dst, dropout=0.5, clock=CLOCK, site=SITE)

    def plain(self, adj, x, a_src, a_dst):
        mask = row_mask_of(CLOCK, SITE, (adj.num_edges, self.heads), 0.5)
        return plain_attention(adj, x, a_src, a_dst, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_task_has_its_own_clock_and_rate(dtype):
    adj, heads = mixed(), 2
    rates, clocks = [0.25, 0.5, 0.75], torch.tensor([[1, 0], [1, 1], [2, 0]])
    count = adj.num_edges * heads
    masks = [row_mask_of(clock, 4, (count // heads, heads), rate) for clock, rate in zip(clocks, rates, strict=True)]
    inputs = TestAttention().made(adj, lead=(3,))
    inputs = [value[:, :, :heads] for value in inputs]
    rates = torch.tensor(rates)

    def stacked(*values):
        return graph_attention(adj, *values, dropout=rates, clock=clocks, site=4)

    def mapped(*values):
        one = lambda x, s, d, rate, clock: graph_attention(adj, x, s, d, dropout=rate, clock=clock, site=4)  # noqa: E731
        return torch.vmap(one)(*values, rates, clocks)

    for function in (stacked, mapped):
        assert_agrees(function, lambda *values: plain_attention(adj, *values, torch.stack(masks)), inputs, dtype)


@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8, 12, 13])
@pytest.mark.parametrize("width", [7, 8, 16])
def test_every_way_to_group_heads(width, heads):
    """The CPU kernels take eight or four heads at once, and heads of eight features side by side."""
    adj = mixed()
    shapes = (adj.num_cols, heads, width), (adj.num_cols, heads), (adj.num_rows, heads)
    inputs = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    mask = row_mask_of(CLOCK, SITE, (adj.num_edges, heads), 0.5)
    assert_agrees(
        lambda *a: graph_attention(adj, *a, dropout=0.5, clock=CLOCK, site=SITE),
        lambda *a: plain_attention(adj, *a, mask), inputs, torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize("slope", [0.0, 0.01, 1.0])
def test_slopes(slope):
    adj = mixed()
    inputs = TestAttention().made(adj)
    assert_agrees(
        lambda *a: graph_attention(adj, *a, slope=slope), lambda *a: plain_attention(adj, *a, slope=slope),
        inputs, torch.float64,
    )  # fmt: skip


def test_large_scores_do_not_overflow():
    adj = mixed()
    x, a_src, a_dst = TestAttention().made(adj)
    for dtype in (torch.float32, torch.float64):
        out = graph_attention(adj, x.to(dtype), 1e4 * a_src.to(dtype), 1e4 * a_dst.to(dtype))
        expected = plain_attention(adj, x, 1e4 * a_src.to(dtype).double(), 1e4 * a_dst.to(dtype).double())
        assert_near(out, expected, 1e-2 if dtype == torch.float32 else 1e-9)


def test_dropout_without_a_clock_drops_nothing():
    adj = mixed()
    inputs = TestAttention().made(adj)
    assert torch.equal(graph_attention(adj, *inputs, dropout=0.9), graph_attention(adj, *inputs))


def test_rows_must_agree():
    with pytest.raises(InputError, match=r"x has 18 rows and a_dst 24; the adjacency is 24 x 19"):
        graph_attention(mixed(), torch.zeros(18, 1, 2), torch.zeros(18, 1), torch.zeros(24, 1))


def test_rate_must_be_a_rate():
    adj = mixed()
    with pytest.raises(InputError, match=r"p=1.0 must be at least 0 and below 1"):
        graph_attention(adj, *TestAttention().made(adj), dropout=1.0, clock=CLOCK)
