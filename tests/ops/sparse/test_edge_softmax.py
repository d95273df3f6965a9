"""edge_softmax: the softmax over the in-edges of every row."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import GRAPHS, mixed, neighbourhoods
from tests.ops.comparing import assert_near
from tests.ops.contract import OperatorContract
from weft.core.errors import InputError
from weft.ops import edge_softmax


def plain_softmax(adj, scores):
    parts = [scores[..., span, :].softmax(-2) for _, span, _ in neighbourhoods(adj)]
    return torch.cat(parts, -2) if parts else scores + 0


class TestSoftmax(OperatorContract):
    """Widths are heads."""

    def inputs(self, adj, width, lead, random):
        return [3 * torch.randn(*lead, adj.num_edges, width, generator=random, dtype=torch.float64)]

    def call(self, adj, scores):
        return edge_softmax(adj, scores)

    def plain(self, adj, scores):
        return plain_softmax(adj, scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_scores_do_not_overflow(dtype):
    adj = mixed()
    scores = torch.randn(adj.num_edges, 3, dtype=torch.float64) * 1e4
    assert_near(edge_softmax(adj, scores.to(dtype)), plain_softmax(adj, scores.to(dtype).double()), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_edge_at_minus_infinity_gets_nothing(dtype):
    adj = mixed()
    scores = torch.randn(adj.num_edges, 2, dtype=dtype)
    scores[1] = -torch.inf
    out = edge_softmax(adj, scores)
    assert out[1].tolist() == [0.0, 0.0]
    assert_near(out, plain_softmax(adj, scores.double()), 1e-6)


@pytest.mark.parametrize("name", GRAPHS)
def test_coefficients_of_a_row_sum_to_one(name):
    adj = GRAPHS[name]()
    out = edge_softmax(adj, torch.randn(adj.num_edges, 4))
    sums = torch.zeros(adj.num_rows, 4).index_add(0, adj.rows().long(), out)
    assert torch.allclose(sums, (adj.degrees() > 0).float()[:, None].expand(-1, 4), atol=1e-6)


def test_one_score_for_each_edge():
    adj = mixed()
    with pytest.raises(InputError, match=rf"scores of shape \(3, 2\) must be \[..., {adj.num_edges} edges, heads\]"):
        edge_softmax(adj, torch.zeros(3, 2))
    with pytest.raises(InputError, match=r"scores of shape"):
        edge_softmax(adj, torch.zeros(adj.num_edges))
