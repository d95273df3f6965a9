"""multi_sddmm and multi_edge_softmax: several sources, each as if alone."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import GRAPHS, mixed
from tests.ops.comparing import TOLERANCE, assert_near
from tests.weave.lab.test_multi_spmm import made
from weft.core.errors import InputError
from weft.ops import edge_softmax, sddmm
from weft.ops.csr.packed import pack_csr, unpack_csr
from weft.weave.lab.multi import Ends, multi_edge_softmax, multi_edge_softmax_torch, multi_sddmm, multi_sddmm_torch


def ends(adj, dtype=torch.float64):
    shapes = (((), 1, 3), ((2,), 2, 2), ((2, 2), 1, 1))
    return [
        Ends(
            made(*lead, adj.num_rows, heads * width, dtype=dtype, seed=place),
            made(*lead, adj.num_cols, heads * width, dtype=dtype, seed=place + 9),
            heads,
        )
        for place, (lead, heads, width) in enumerate(shapes)
    ]


def scores(adj, dtype=torch.float64):
    shapes = (((), 1), ((2,), 3), ((2, 2), 2))
    return [made(*lead, adj.num_edges, heads, dtype=dtype, seed=place) for place, (lead, heads) in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_as_the_references_have_it(name, dtype):
    adj = GRAPHS[name]()
    csr = unpack_csr(pack_csr(adj, rows=True))
    for mine, theirs in zip(multi_sddmm(adj, ends(adj, dtype)), multi_sddmm_torch(csr, ends(adj, dtype)), strict=True):
        assert_near(mine, theirs, TOLERANCE[dtype])
    given = scores(adj, dtype)
    for mine, theirs in zip(multi_edge_softmax(adj, given), multi_edge_softmax_torch(csr, given), strict=True):
        assert_near(mine, theirs, TOLERANCE[dtype])


def test_as_alone_bit_for_bit():
    adj = mixed()
    for mine, pair in zip(multi_sddmm(adj, ends(adj, torch.float32)), ends(adj, torch.float32), strict=True):
        assert torch.equal(mine, sddmm(adj, pair.a, pair.b, pair.heads))
    given = scores(adj, torch.float32)
    for mine, one in zip(multi_edge_softmax(adj, given), given, strict=True):
        assert torch.equal(mine, edge_softmax(adj, one))


def test_gradcheck():
    adj = mixed(num_rows=7, num_cols=5)
    base = ends(adj)
    leaves = [value.requires_grad_() for pair in base for value in (pair.a, pair.b)]

    def dots(*values):
        return tuple(
            multi_sddmm(adj, [Ends(values[2 * k], values[2 * k + 1], pair.heads) for k, pair in enumerate(base)])
        )

    assert torch.autograd.gradcheck(dots, leaves, check_undefined_grad=False)
    leaves = [value.requires_grad_() for value in scores(adj)]
    assert torch.autograd.gradcheck(lambda *s: tuple(multi_edge_softmax(adj, s)), leaves, check_undefined_grad=False)


def test_complaints():
    adj = mixed()
    with pytest.raises(InputError, match="widths 3 and 4 must be equal"):
        multi_sddmm(adj, [Ends(made(24, 3), made(19, 4))])
    with pytest.raises(InputError, match="a has 23 rows and b 19; the adjacency is 24 x 19"):
        multi_sddmm(adj, [Ends(made(23, 3), made(19, 3))])
    with pytest.raises(InputError, match="edges, heads"):
        multi_edge_softmax(adj, [made(3, 2)])
