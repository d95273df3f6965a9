"""spmm_max: the largest neighbour, feature by feature."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import from_pairs, neighbourhoods
from tests.ops.comparing import value_and_gradients
from tests.ops.contract import OperatorContract
from weft.ops import spmm
from weft.ops.csr.packed import pack_csr, unpack_csr
from weft.ops.sparse.spmm_max import spmm_max_torch


def plain_max(adj, x):
    rows = []
    for _, span, cols in neighbourhoods(adj):
        messages = x[..., cols, :]
        if adj.weight is not None:
            messages = messages * adj.weight[span, None].to(x.dtype)
        rows.append(messages.amax(-2) if len(cols) else x.new_zeros(*x.shape[:-2], x.shape[-1]))
    return torch.stack(rows, -2) if rows else x.new_zeros(*x.shape[:-2], 0, x.shape[-1])


class TestMax(OperatorContract):
    def inputs(self, adj, width, lead, random):
        # Odd numbers, each once in a column: times powers of two they are exact in half precision and never tie.
        # (On a tie the plain formula would share the gradient.)
        place = torch.rand(*lead, adj.num_cols, width, generator=random).argsort(-2)
        sign = torch.randint(0, 2, place.shape, generator=random) * 2 - 1
        return [(2 * place + 1).double() * sign / 8]

    def call(self, adj, x):
        return spmm(adj, x, reduce="max")

    def plain(self, adj, x):
        return plain_max(adj, x)


class TestWeightedMax(TestMax):
    def weighted(self, adj):
        weight = torch.tensor([0.5, -1.0, 2.0, 1.0, -0.5])[torch.arange(adj.num_edges) % 5]
        return adj.derived("weighted", lambda: adj.scaled(weight=weight))

    def call(self, adj, x):
        return spmm(self.weighted(adj), x, reduce="max")

    def plain(self, adj, x):
        return plain_max(self.weighted(adj), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_on_a_tie_the_first_edge_wins(dtype):
    adj = from_pairs(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 2]), 2, 3)
    x = torch.tensor([[1.0, -2.0], [3.0, -2.0], [3.0, -2.0]], dtype=dtype)
    out, (grad,) = value_and_gradients(lambda x: spmm(adj, x, reduce="max"), [x], torch.ones(2, 2))
    assert out.tolist() == [[3.0, -2.0], [3.0, -2.0]]
    assert grad.tolist() == [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_winners_are_edges_and_none_is_minus_one(dtype):
    adj = from_pairs(torch.tensor([0, 2]), torch.tensor([1, 0]), 3, 2)
    x = torch.tensor([[5.0], [-1.0]], dtype=dtype)
    _, winner = torch.ops.weft.spmm_max(x, None, pack_csr(adj), [])
    assert winner.tolist() == [[0], [-1], [1]]
    assert torch.equal(winner, spmm_max_torch(x, None, unpack_csr(pack_csr(adj)))[1])


def test_minus_infinity_is_a_number():
    adj = from_pairs(torch.tensor([0, 0]), torch.tensor([0, 1]), 1, 2)
    x = torch.full((2, 1), -torch.inf)
    assert spmm(adj, x, reduce="max").item() == -torch.inf
