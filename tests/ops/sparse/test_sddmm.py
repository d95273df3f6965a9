"""sddmm: a dot product for every edge."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import mixed, neighbourhoods
from tests.ops.contract import OperatorContract
from weft.core.errors import InputError
from weft.ops import sddmm


def plain_sddmm(adj, a, b, heads=1):
    edges = [a[..., row : row + 1, :] * b[..., cols, :] for row, _, cols in neighbourhoods(adj)]
    products = torch.cat(edges, -2) if edges else a.new_zeros(*a.shape[:-2], 0, a.shape[-1])
    return products.unflatten(-1, (heads, -1)).sum(-1)


class TestOneHead(OperatorContract):
    heads = 1

    def inputs(self, adj, width, lead, random):
        sizes = (adj.num_rows, adj.num_cols)
        return [torch.randn(*lead, n, self.heads * width, generator=random, dtype=torch.float64) for n in sizes]

    def call(self, adj, a, b):
        return sddmm(adj, a, b, self.heads)

    def plain(self, adj, a, b):
        return plain_sddmm(adj, a, b, self.heads)


class TestHeads(TestOneHead):
    heads = 3


@pytest.mark.parametrize("width", [2, 4, 7, 8, 12, 16, 20, 24, 28, 33, 48])
def test_every_way_to_cut_a_row(width):
    adj = mixed()
    a, b = torch.randn(adj.num_rows, width).double(), torch.randn(adj.num_cols, width).double()
    expected = plain_sddmm(adj, a, b)
    assert torch.allclose(sddmm(adj, a, b), expected, rtol=0, atol=1e-13)
    assert torch.allclose(sddmm(adj, a.float(), b.float()).double(), expected, rtol=0, atol=2e-5)


def test_widths_must_agree():
    with pytest.raises(InputError, match=r"widths 4 and 5 must be equal and divisible by heads=1"):
        sddmm(mixed(), torch.zeros(24, 4), torch.zeros(19, 5))
    with pytest.raises(InputError, match=r"widths 4 and 4 must be equal and divisible by heads=3"):
        sddmm(mixed(), torch.zeros(24, 4), torch.zeros(19, 4), heads=3)


def test_rows_must_agree():
    with pytest.raises(InputError, match=r"a has 19 rows and b 24; the adjacency is 24 x 19"):
        sddmm(mixed(), torch.zeros(19, 4), torch.zeros(24, 4))
