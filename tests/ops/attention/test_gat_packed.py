"""graph_attention_packed: the same attention, over rows and scores that stand side by side."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import GRAPHS, mixed
from weft.core.errors import InputError
from weft.ops import graph_attention, graph_attention_packed
from weft.ops.attention.gat import _packed_backward_op, _packed_op, take_apart
from weft.ops.csr.packed import pack_csr

HEADS, WIDTH, SITE = 3, 5, 4
SQUARE = [name for name in GRAPHS if GRAPHS[name]().num_rows == GRAPHS[name]().num_cols]
CLOCK = torch.tensor([3, 9])


def packed_of(adj, *lead, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(*lead, adj.num_rows, HEADS * (WIDTH + 2), dtype=dtype, generator=generator)
    return values.requires_grad_()


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("name", [*SQUARE, "mixed square"])
def test_equals_the_three_parts(name, rate):
    adj = mixed_square() if name == "mixed square" else GRAPHS[name]()
    packed = packed_of(adj)
    random = {"dropout": rate, "clock": CLOCK, "site": SITE}
    mine = graph_attention_packed(adj, packed, HEADS, **random)
    theirs = graph_attention(adj, *take_apart(packed, HEADS), **random)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    grad = torch.randn(mine.shape, dtype=mine.dtype, generator=torch.Generator().manual_seed(1))
    (mine_grad,), (theirs_grad,) = (torch.autograd.grad(out, packed, grad) for out in (mine, theirs))
    torch.testing.assert_close(mine_grad, theirs_grad, rtol=1e-12, atol=1e-12)


def test_gradients():
    adj = mixed_square()
    packed = packed_of(adj)
    assert torch.autograd.gradcheck(lambda p: graph_attention_packed(adj, p, HEADS, 0.2, 0.3, CLOCK, SITE), (packed,))
    summed = lambda p: graph_attention_packed(adj, p, HEADS).sum(-2)  # noqa: E731
    assert torch.autograd.gradcheck(summed, (packed,))


def test_tasks_and_vmap():
    adj = mixed_square()
    packed = packed_of(adj, 2)
    clocks, rates = torch.tensor([[1, 2], [3, 4]]), torch.tensor([0.2, 0.6])
    together = graph_attention_packed(adj, packed, HEADS, 0.2, rates, clocks, SITE)
    mapped = torch.vmap(lambda p, r, c: graph_attention_packed(adj, p, HEADS, 0.2, r, c, SITE))(packed, rates, clocks)
    alone = [graph_attention_packed(adj, packed[t], HEADS, 0.2, rates[t], clocks[t], SITE) for t in range(2)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mapped, together, rtol=1e-12, atol=1e-12)
    (of_mapped,) = torch.autograd.grad(mapped.square().sum(), packed)
    (of_alone,) = torch.autograd.grad(torch.stack(alone).square().sum(), packed)
    torch.testing.assert_close(of_mapped, of_alone, rtol=1e-12, atol=1e-12)


def test_operators_are_well_registered():
    adj = mixed_square()
    packed = packed_of(adj, dtype=torch.float32)
    csr, back = pack_csr(adj), pack_csr(adj.transposed(), perm=True)
    torch.library.opcheck(_packed_op, (packed, HEADS, 0.2, None, None, 0, csr, back))
    out = [value.detach() for value in _packed_op(packed, HEADS, 0.2, None, None, 0, csr, back)]
    torch.library.opcheck(_packed_backward_op, (out[0], packed.detach(), *out, 0.2, None, None, 0, csr, back))


@pytest.mark.parametrize(
    ("rows", "width", "words"), [(4, 9, "4 rows"), (None, 8, "width of 8"), (None, 6, "width of 6")]
)
def test_mistakes(rows, width, words):
    adj = mixed_square()
    with pytest.raises(InputError, match=words):
        graph_attention_packed(adj, torch.zeros(adj.num_rows if rows is None else rows, width), HEADS)


def test_a_rectangular_adjacency_is_refused():
    adj = mixed()
    with pytest.raises(InputError, match="must be square"):
        graph_attention_packed(adj, torch.zeros(adj.num_rows, 9), HEADS)


def mixed_square():
    return mixed(num_rows=12, num_cols=12)
