"""A graph without data has the sizes of the one with data, whatever is derived from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weft
from tests.graphs_for_tests import PRODUCTS, random_graph, without_histogram
from weft.capture.meta_graph import Degrees, counted_degrees, meta_graph
from weft.core.graph_stats import GraphStats
from weft.nn.conv import with_identity
from weft.ops.csr.worklist import build_worklist, worklist
from weft.runtime.dry_run import held_by

KINDS = [{}, {"directed": True}, {"weighted": True}, {"directed": True, "weighted": True}]


def derive(graph: weft.Graph) -> list[torch.Tensor]:
    """Everything that layers ask of an adjacency, and all that is kept of it."""
    for form in (graph.adj, graph.adj.gcn(), graph.adj.mean(), with_identity(graph.adj)):
        worklist(form)
        worklist(form.transposed())
        assert form.transposed().perm is not None
    return list(held_by(graph.adj))


def sizes(tensors: list[torch.Tensor]) -> list[tuple]:
    distinct = {t.untyped_storage()._cdata: t for t in tensors}
    return sorted((t.untyped_storage().nbytes(), str(t.dtype)) for t in distinct.values())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_derived_has_the_sizes_of_the_real_thing(kind):
    graph = random_graph(**kind)
    assert sizes(derive(meta_graph(graph))) == sizes(derive(graph))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_from_a_summary_the_sizes_are_near(kind):
    graph = random_graph(**kind)
    from_summary, real = sizes(derive(meta_graph(graph.stats()))), sizes(derive(graph))
    assert sum(size for size, _ in from_summary) == pytest.approx(sum(size for size, _ in real), rel=0.03)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=60))
def test_pieces_of_work_are_counted_as_they_are_cut(degrees):
    indptr = torch.tensor([0, *degrees]).cumsum(0)
    real = build_worklist(indptr, 16, 256)
    light, single, hubs, partials = Degrees.counted(indptr.diff()).pieces(16, 256)
    assert light == real.light_row.numel()
    assert single + partials == real.heavy_row.numel()
    assert (hubs, partials) == (real.hub_row.numel(), real.hub_of_partial.numel())


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200))
def test_a_histogram_keeps_every_row_and_about_every_edge(degrees):
    adj = weft.ops.Adjacency(torch.tensor([0, *degrees]).cumsum(0).int(), torch.zeros(sum(degrees), dtype=torch.int32))
    bins = [0] * (max(degrees).bit_length() + 1)
    for degree in degrees:
        bins[degree.bit_length()] += 1
    stats = GraphStats("g", adj.num_rows, sum(degrees), max_degree=max(degrees), degree_histogram=tuple(bins))
    found = Degrees.from_histogram(stats)
    assert sum(rows for _, rows in found.counts) == len(degrees)
    assert sum(degree * rows for degree, rows in found.counts) == pytest.approx(sum(degrees), rel=0.5, abs=1)
    light = sum(degree <= 15 for degree in degrees)  # a border of bins: 15 is the last of four bits
    assert found.pieces(15, 1 << 20)[0] == light


def test_without_a_histogram_every_row_is_average():
    assert Degrees.from_histogram(without_histogram(PRODUCTS)).pieces(64, 4096) == (PRODUCTS.num_nodes, 0, 0, 0)


def test_it_answers_as_a_graph_does():
    graph = meta_graph(PRODUCTS)
    assert (graph.num_nodes, graph.num_edges) == (PRODUCTS.num_nodes, PRODUCTS.num_edges)
    assert (graph.num_features, graph.num_classes) == (100, 47)
    assert graph.stats() == PRODUCTS
    assert graph.device.type == "meta"


@pytest.mark.parametrize("kind", [{"sparse": True}, {"multilabel": True}])
def test_features_and_labels_have_their_types(kind):
    graph = random_graph(**kind)
    without = meta_graph(graph.stats())
    assert type(without.x) is type(graph.x)
    assert without.x.shape == graph.x.shape
    assert (without.y.shape, without.y.dtype) == (graph.y.shape, graph.y.dtype)


def test_degrees_are_counted_once():
    adj = random_graph(directed=True).adj
    by_row, by_col = counted_degrees(adj)
    degree, rows = torch.unique(adj.indptr.diff(), return_counts=True)
    assert by_row.counts == tuple(zip(degree.tolist(), rows.tolist(), strict=True))
    assert sum(degree * rows for degree, rows in by_col.counts) == adj.num_edges
    assert counted_degrees(adj)[0] is by_row
    assert counted_degrees(adj.mean())[1] is by_col  # the same structure
