"""Adjacency and what it derives, against dense matrices; work lists cover every edge once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs_for_tests import GRAPHS, adjacencies, from_pairs, mixed
from weft.ops import Adjacency
from weft.ops.csr.adjacency import loop_weights, offset_dtype
from weft.ops.csr.worklist import build_worklist


def dense(adj: Adjacency) -> torch.Tensor:
    """The matrix ``[N, M]`` in float64."""
    out = torch.zeros(adj.num_rows, adj.num_cols, dtype=torch.float64)
    values = torch.ones(adj.num_edges, dtype=torch.float64) if adj.weight is None else adj.weight.double()
    rows, cols = adj.rows().long(), adj.indices.long()
    out[rows, cols] = values
    if adj.row_scale is not None:
        out *= adj.row_scale.double()[:, None]
    return out if adj.col_scale is None else out * adj.col_scale.double()


def square(seed: int = 0, loops: bool = False, weighted: bool = False) -> Adjacency:
    random = torch.Generator().manual_seed(seed)
    there = torch.rand(9, 9, generator=random) < 0.3
    there.fill_diagonal_(False)
    if loops:
        there[2, 2] = there[5, 5] = True
    adj = from_pairs(*there.nonzero(as_tuple=True), 9, 9)
    return adj.scaled(weight=torch.rand(adj.num_edges, generator=random) + 0.5) if weighted else adj


@pytest.mark.parametrize("name", GRAPHS)
def test_transpose(name):
    adj = GRAPHS[name]()
    back = adj.transposed()
    assert (back.num_rows, back.num_cols) == (adj.num_cols, adj.num_rows)
    assert torch.equal(dense(back), dense(adj).T)
    assert torch.equal(adj.indices[back.perm.long()].long(), back.rows().long())
    assert adj.transposed() is back


def test_transpose_carries_factors():
    adj = mixed().scaled(weight=torch.rand(mixed().num_edges), row_scale=torch.rand(24), col_scale=torch.rand(19))
    assert torch.allclose(dense(adj.transposed()), dense(adj).T)


def test_symmetric_transpose_shares_its_arrays():
    there = dense(square()).bool()
    adj = from_pairs(*(there | there.T).nonzero(as_tuple=True), 9, 9)
    adj.symmetric = True
    back = adj.transposed()
    assert back.indices is adj.indices
    assert torch.equal(dense(back), dense(adj).T)
    assert torch.equal(adj.indices[back.perm.long()].long(), back.rows().long())


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_self_loops(weighted, loops):
    adj = square(loops=loops, weighted=weighted)
    expected = dense(adj)
    missing = expected.diagonal() == 0
    expected[missing, missing] = 1.0
    looped = adj.with_self_loops()
    assert torch.allclose(dense(looped), expected)
    assert looped.num_edges == int((expected != 0).sum())
    sorted_within_rows = looped.indices.diff()[looped.rows().diff() == 0] > 0
    assert sorted_within_rows.all()


def test_of_several_loops_the_last_gives_its_weight():
    """Every weight is written to a place of its own: on a GPU the last of several writes is any of them."""
    rows, weight = torch.tensor([1, 1, 2, 4, 4, 4]), torch.arange(2.0, 8.0)
    assert loop_weights(rows, weight, 6).tolist() == [1, 3, 4, 1, 7, 1]
    none = torch.tensor([], dtype=torch.int64)
    assert loop_weights(none, torch.tensor([]), 2).tolist() == [1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_too_the_last_loop_gives_its_weight():
    rows, weight = torch.arange(200_000) // 100, torch.rand(200_000)
    expected = loop_weights(rows, weight, 2000)
    assert torch.equal(expected, weight[99::100])
    assert torch.equal(loop_weights(rows.cuda(), weight.cuda(), 2000).cpu(), expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_gcn(weighted):
    adj = square(loops=True, weighted=weighted)
    matrix = dense(adj.with_self_loops())
    scale = matrix.sum(1).rsqrt()
    assert torch.allclose(dense(adj.gcn()), scale[:, None] * matrix * scale, atol=1e-6)


@pytest.mark.parametrize("name", GRAPHS)
def test_mean(name):
    adj = GRAPHS[name]()
    matrix = dense(adj)
    assert torch.allclose(dense(adj.mean()), matrix / matrix.sum(1, keepdim=True).clamp(min=1), atol=1e-6)


def test_degrees_and_rows_are_shared_with_scaled_copies():
    adj = mixed()
    assert adj.scaled(row_scale=torch.ones(24)).rows() is adj.rows()
    assert torch.equal(adj.degrees(), dense(adj).sum(1).long())


def test_offsets_widen_at_two_to_the_31():
    assert offset_dtype(2**31 - 1) == torch.int32
    assert offset_dtype(2**31) == torch.int64


@settings(max_examples=50, deadline=None)
@given(adj=adjacencies(), light=st.integers(0, 5), more=st.integers(1, 5))
def test_a_worklist_covers_every_edge_once_in_bounded_pieces(adj, light, more):
    chunk = light + more
    work = build_worklist(adj.indptr, light, chunk)
    partials = work.hub_of_partial.numel()
    owner = torch.cat([work.hub_row[work.hub_of_partial.long()], work.heavy_row[partials:], work.light_row])
    start, length = torch.cat([work.heavy_start, work.light_start]), torch.cat([work.heavy_len, work.light_len])
    seen = []
    for row, first, count in zip(owner.tolist(), start.tolist(), length.tolist(), strict=True):
        assert count <= chunk
        assert adj.indptr[row] <= first
        assert first + count <= adj.indptr[row + 1]
        seen += range(first, first + count)
    assert sorted(seen) == list(range(adj.num_edges))
    assert sorted(set(owner.tolist())) == list(range(adj.num_rows))
    assert work.hub_ptr.tolist() == [0, *torch.bincount(work.hub_of_partial, minlength=work.hub_row.numel()).cumsum(0)]


def test_other_weights_are_not_symmetric_because_the_structure_is():
    indptr, indices = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    weight = torch.tensor([2.0, 2.0])
    adj = Adjacency(indptr, indices, weight=weight, symmetric=True)
    other = adj.scaled(weight=torch.tensor([2.0, 5.0]))
    assert not other.symmetric
    assert other.transposed().weight.tolist() == [5.0, 2.0]
    assert adj.scaled(weight=weight).symmetric
    assert not adj.scaled().symmetric


def test_a_row_without_edges_has_a_mean_of_zero():
    indptr, indices = torch.tensor([0, 2, 2, 3], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    adj = Adjacency(indptr, indices)
    assert adj.inverse_degrees().tolist() == [0.5, 1.0, 1.0]
    assert adj.inverse_root_degrees().tolist() == pytest.approx([2**-0.5, 0.0, 1.0])
    weighted = adj.scaled(weight=torch.tensor([1.0, -1.0, 4.0]))
    assert weighted.inverse_root_degrees().tolist() == [0.0, 0.0, 0.5]
    below = adj.scaled(weight=torch.tensor([1.0, -3.0, 4.0]))
    assert below.inverse_root_degrees().isnan().tolist() == [True, False, False]  # as in PyG
