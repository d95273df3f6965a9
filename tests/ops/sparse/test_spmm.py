"""spmm: sums and means, weighted or not, with scales."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import from_pairs, mixed, neighbourhoods
from tests.ops.comparing import assert_agrees, assert_near, value_and_gradients
from tests.ops.contract import OperatorContract
from weft.core.errors import InputError
from weft.ops import spmm


def plain_spmm(adj, x, weight=None, mean=False):
    rows = []
    for row, span, cols in neighbourhoods(adj):
        messages = x[..., cols, :]
        if weight is not None:
            messages = messages * weight[..., span, None]
        if adj.col_scale is not None:
            messages = messages * adj.col_scale[cols, None]
        total = messages.sum(-2) / (max(len(cols), 1) if mean else 1)
        rows.append(total if adj.row_scale is None else total * adj.row_scale[row])
    return torch.stack(rows, -2) if rows else x.new_zeros(*x.shape[:-2], 0, x.shape[-1])


class TestSum(OperatorContract):
    def inputs(self, adj, width, lead, random):
        return [torch.randn(*lead, adj.num_cols, width, generator=random, dtype=torch.float64)]

    def call(self, adj, x):
        return spmm(adj, x)

    def plain(self, adj, x):
        return plain_spmm(adj, x)


class TestMean(TestSum):
    exact = 1e-7  # the reciprocal degree is kept in float32

    def call(self, adj, x):
        return spmm(adj, x, reduce="mean")

    def plain(self, adj, x):
        return plain_spmm(adj, x, mean=True)


class TestWeighted(TestSum):
    def inputs(self, adj, width, lead, random):
        weight = torch.randn(*lead, adj.num_edges, generator=random, dtype=torch.float64)
        return [*super().inputs(adj, width, lead, random), weight]

    def call(self, adj, x, weight):
        return spmm(adj, x, weight)

    def plain(self, adj, x, weight):
        return plain_spmm(adj, x, weight)


class TestScaled(TestSum):
    """Factors of rows and columns that are no inputs, as in GCN."""

    def scaled(self, adj):
        sizes = (adj.num_edges, adj.num_rows, adj.num_cols)
        factors = [(torch.arange(size) * 7 % 11 + 3) / 8 for size in sizes]
        return adj.derived("scaled", lambda: adj.scaled(weight=factors[0], row_scale=factors[1], col_scale=factors[2]))

    def call(self, adj, x):
        adj = self.scaled(adj)
        return spmm(adj, x)

    def plain(self, adj, x):
        adj = self.scaled(adj)
        return plain_spmm(adj, x, adj.weight.double())


@pytest.mark.parametrize("width", [1, 2, 4, 7, 8, 15, 16, 31, 32, 33, 48, 63, 64, 80, 100, 128, 130, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_way_to_cut_a_row(width, dtype):
    adj = mixed()
    x = torch.randn(adj.num_cols, width, dtype=dtype)
    assert_near(spmm(adj, x), plain_spmm(adj, x.double()), 1e-6)


def test_one_weight_for_all_tasks_gets_the_sum_of_their_gradients():
    adj = mixed()
    x = torch.randn(2, 3, adj.num_cols, 4, dtype=torch.float64)
    weight = torch.randn(adj.num_edges, dtype=torch.float64)
    assert_agrees(lambda *a: spmm(adj, *a), lambda *a: plain_spmm(adj, *a), [x, weight], torch.float64)


def test_weight_of_the_outer_task_only():
    """Nested vmap where the weight belongs to the outer tasks; equal sizes, so that mixing them up would not fail."""
    adj = mixed()
    x = torch.randn(3, 3, adj.num_cols, 4, dtype=torch.float64)
    weight = torch.randn(3, adj.num_edges, dtype=torch.float64)
    nested = torch.vmap(lambda x, w: torch.vmap(lambda x: spmm(adj, x, w))(x))
    out, grads = value_and_gradients(nested, [x, weight])
    expected, expected_grads = value_and_gradients(lambda x, w: plain_spmm(adj, x, w[:, None]), [x, weight])
    assert_near(out, expected, 1e-12)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        assert_near(mine, theirs, 1e-12)


def test_symmetric_structure_shares_its_transpose():
    adj = mixed(num_rows=12, num_cols=12)
    both = torch.zeros(12, 12)
    both[adj.rows().long(), adj.indices.long()] = 1
    both = ((both + both.T) > 0).nonzero(as_tuple=True)
    symmetric = from_pairs(*both, 12, 12)
    symmetric.symmetric = True
    x = torch.randn(12, 3, dtype=torch.float64)
    assert_agrees(lambda x: spmm(symmetric, x), lambda x: plain_spmm(symmetric, x), [x], torch.float64)
    weight = torch.randn(symmetric.num_edges, dtype=torch.float64)
    assert_agrees(lambda *a: spmm(symmetric, *a), lambda *a: plain_spmm(symmetric, *a), [x, weight], torch.float64)


def test_second_derivative():
    adj = mixed(num_rows=5, num_cols=4)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(adj.num_edges, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, w: spmm(adj, x, w), [x, weight])


def test_nothing_is_transposed_without_gradients():
    adj = mixed()
    with torch.no_grad():
        spmm(adj, torch.randn(adj.num_cols, 3))
    assert "transposed" not in adj._derived


def test_wrong_number_of_rows():
    with pytest.raises(InputError, match=r"x has 18 rows, the adjacency has 19 columns"):
        spmm(mixed(), torch.zeros(18, 2))


def test_unknown_reduction():
    with pytest.raises(InputError, match=r"reduce='median' must be 'sum', 'mean' or 'max'"):
        spmm(mixed(), torch.zeros(19, 2), reduce="median")
