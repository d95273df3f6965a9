"""graph_attention_v2: GATv2's attention, with and without dropout of its coefficients."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import leaky_relu

from tests.graphs_for_tests import mixed, neighbourhoods
from tests.ops.bits import row_mask_of
from tests.ops.comparing import assert_agrees
from tests.ops.contract import OperatorContract
from weft.core.errors import InputError
from weft.ops import graph_attention_v2

CLOCK, SITE = torch.tensor([11, 3]), 2


def plain_attention_v2(adj, x_src, x_dst, att, mask=None, slope=0.2):
    rows = []
    for row, span, cols in neighbourhoods(adj):
        argument = x_src[..., cols, :, :] + x_dst[..., row : row + 1, :, :]
        alpha = (leaky_relu(argument, slope) * att[..., None, :, :]).sum(-1).softmax(-2)
        alpha = alpha if mask is None else alpha * mask[..., span, :]
        rows.append((alpha[..., None] * x_src[..., cols, :, :]).sum(-3))
    return torch.stack(rows, -3) if rows else x_src.new_zeros(*x_src.shape[:-3], 0, *x_src.shape[-2:])


class TestAttentionV2(OperatorContract):
    heads = 3

    def inputs(self, adj, width, lead, random):
        shapes = (adj.num_cols, self.heads, width), (adj.num_rows, self.heads, width), (self.heads, width)
        return [torch.randn(*lead, *shape, generator=random, dtype=torch.float64) / 2 for shape in shapes]

    def call(self, adj, x_src, x_dst, att):
        return graph_attention_v2(adj, x_src, x_dst, att)

    def plain(self, adj, x_src, x_dst, att):
        return plain_attention_v2(adj, x_src, x_dst, att)


class TestDroppedOut(TestAttentionV2):
    heads = 2

    def call(self, adj, x_src, x_dst, att):
        return graph_attention_v2(adj, x_src, x_dst, att, dropout=0.5, clock=CLOCK, site=SITE)

    def plain(self, adj, x_src, x_dst, att):
        mask = row_mask_of(CLOCK, SITE, (adj.num_edges, self.heads), 0.5)
        return plain_attention_v2(adj, x_src, x_dst, att, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_task_has_its_own_clock_and_rate(dtype):
    adj, heads = mixed(), 3
    rates, clocks = [0.25, 0.5, 0.75], torch.tensor([[1, 0], [1, 1], [2, 0]])
    count = adj.num_edges * heads
    masks = [row_mask_of(clock, 4, (count // heads, heads), rate) for clock, rate in zip(clocks, rates, strict=True)]
    inputs = TestAttentionV2().made(adj, lead=(3,))
    rates = torch.tensor(rates)

    def stacked(*values):
        return graph_attention_v2(adj, *values, dropout=rates, clock=clocks, site=4)

    assert_agrees(stacked, lambda *values: plain_attention_v2(adj, *values, torch.stack(masks)), inputs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tasks_may_share_att(dtype):
    adj = mixed()
    x_src, x_dst, att = TestAttentionV2().made(adj, lead=(2,))
    inputs = [x_src, x_dst, att[0]]
    assert_agrees(lambda *a: graph_attention_v2(adj, *a), lambda *a: plain_attention_v2(adj, *a), inputs, dtype)


@pytest.mark.parametrize("width", [2, 4, 7, 8, 12, 15, 16, 20, 28, 33])
def test_every_way_to_cut_a_row(width):
    adj = mixed()
    inputs = TestAttentionV2().made(adj, width)
    assert_agrees(lambda *a: graph_attention_v2(adj, *a), lambda *a: plain_attention_v2(adj, *a), inputs, torch.float32)


@pytest.mark.parametrize("slope", [0.0, 0.01, 1.0])
def test_slopes(slope):
    adj = mixed()
    inputs = TestAttentionV2().made(adj)
    assert_agrees(
        lambda *a: graph_attention_v2(adj, *a, slope=slope), lambda *a: plain_attention_v2(adj, *a, slope=slope),
        inputs, torch.float64,
    )  # fmt: skip


def test_rows_must_agree():
    with pytest.raises(InputError, match=r"x_src has 18 rows and x_dst 24; the adjacency is 24 x 19"):
        graph_attention_v2(mixed(), torch.zeros(18, 1, 2), torch.zeros(24, 1, 2), torch.zeros(1, 2))
