"""CSR from edges, against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.graphs_for_tests import dense_adjacency
from weft.graph import Graph
from weft.graph.build import is_symmetric
from weft.ops.csr.adjacency import offset_dtype


@st.composite
def edge_lists(draw):
    nodes = draw(st.integers(1, 9))
    edges = draw(st.integers(0, 40))
    ids = npst.arrays(np.int64, edges, elements=st.integers(0, nodes - 1))
    weights = npst.arrays(np.float32, edges, elements=st.floats(-4, 4, width=32))
    return nodes, draw(ids), draw(ids), draw(weights)


@settings(max_examples=50, deadline=None)
@given(edge_lists())
def test_directed_edges_match_scipy(edges):
    nodes, src, dst, weight = edges
    graph = Graph.from_edges(src, dst, num_nodes=nodes, edge_weight=weight)
    expected = sp.coo_array((weight.astype(np.float64), (dst, src)), shape=(nodes, nodes)).toarray()
    assert graph.num_edges == len(src), "parallel edges are kept"
    np.testing.assert_allclose(dense_adjacency(graph), expected, atol=1e-5)
    graph.verify()
    if graph.adj.symmetric:
        np.testing.assert_array_equal(dense_adjacency(graph), dense_adjacency(graph).T)


@settings(max_examples=50, deadline=None)
@given(edge_lists())
def test_symmetry_is_detected_exactly(edges):
    nodes, src, dst, _ = edges
    counts = sp.coo_array((np.ones(len(src)), (dst, src)), shape=(nodes, nodes)).toarray()
    assert Graph.from_edges(src, dst, num_nodes=nodes).adj.symmetric == np.array_equal(counts, counts.T)


@settings(max_examples=50, deadline=None)
@given(edge_lists())
def test_undirected_joins_each_pair_once_each_way(edges):
    nodes, src, dst, _ = edges
    graph = Graph.from_edges(src, dst, num_nodes=nodes, directed=False)
    once = sp.coo_array((np.ones(len(src)), (dst, src)), shape=(nodes, nodes)).toarray() > 0
    np.testing.assert_array_equal(dense_adjacency(graph), once | once.T)
    assert graph.adj.symmetric
    assert is_symmetric(graph.adj)
    again = Graph.from_edges(*graph.edge_index(), num_nodes=nodes, directed=False)
    assert torch.equal(again.edge_index(), graph.edge_index())


@settings(max_examples=50, deadline=None)
@given(edge_lists())
def test_undirected_weights_are_means_and_stay_what_they_are(edges):
    nodes, src, dst, weight = edges
    graph = Graph.from_edges(src, dst, num_nodes=nodes, edge_weight=weight, directed=False)
    found = dict(zip(map(tuple, graph.edge_index().T.tolist()), graph.edge_weight.tolist(), strict=True))
    for (u, v), value in found.items():
        same = ((src == u) & (dst == v)) | ((src == v) & (dst == u))
        assert value == pytest.approx(weight[same].mean(dtype=np.float64), abs=1e-6)
        assert found[v, u] == value
    again = Graph.from_edges(*graph.edge_index(), num_nodes=nodes, edge_weight=graph.edge_weight, directed=False)
    assert torch.equal(again.edge_weight, graph.edge_weight)


def test_weights_decide_symmetry():
    pair = {"src": [0, 1], "dst": [1, 0], "num_nodes": 2}
    assert Graph.from_edges(**pair, edge_weight=[2.0, 2.0]).adj.symmetric
    assert not Graph.from_edges(**pair, edge_weight=[2.0, 3.0]).adj.symmetric


def test_relations_follow_their_edges_and_keep_parallel_edges_apart():
    graph = Graph.from_edges([0, 1, 0, 0], [1, 0, 1, 1], relation=[3, 3, 0, 3], directed=False)
    triples = sorted(zip(*graph.edge_index().tolist(), graph.relation.tolist(), strict=True))
    assert triples == [(0, 1, 0), (0, 1, 3), (1, 0, 0), (1, 0, 3)]
    directed = Graph.from_edges([2, 0, 1], [0, 1, 0], relation=[7, 8, 9])
    triples = sorted(zip(*directed.edge_index().tolist(), directed.relation.tolist(), strict=True))
    assert triples == [(0, 1, 8), (1, 0, 9), (2, 0, 7)]
    assert directed.relation.dtype == torch.int32


def test_the_transpose_of_a_symmetric_graph_shares_its_arrays():
    graph = Graph.from_edges([0, 1, 2], [1, 2, 0], directed=False)
    assert graph.adj.transposed().indices is graph.adj.indices
    directed = Graph.from_edges([0, 1, 2], [1, 2, 1])
    src, dst = directed.edge_index()
    back = directed.adj.transposed()
    assert sorted(zip(back.rows().tolist(), back.indices.tolist(), strict=True)) == sorted(
        zip(src.tolist(), dst.tolist(), strict=True)
    )


def test_offsets_are_64_bit_from_two_to_the_31_edges_on():
    assert offset_dtype(2**31 - 1) == torch.int32
    assert offset_dtype(2**31) == torch.int64
    graph = Graph.from_edges([0], [1])
    assert graph.adj.indptr.dtype == graph.adj.indices.dtype == torch.int32


def test_the_given_arrays_are_left_alone():
    src, dst = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 1])
    Graph.from_edges(src, dst, 3)
    Graph.from_edges(src, dst, 3, directed=False)
    assert src.tolist() == [2, 0, 1]
    assert dst.tolist() == [0, 2, 1]


def test_ids_near_the_32_bit_limit_do_not_overflow():
    # The keys dst * N + src stay below 2^62; only the offsets array would be large, so keys alone are tried.
    from weft.graph.build import edge_keys

    top = 2**31 - 2
    key = edge_keys(torch.tensor([top], dtype=torch.int32), torch.tensor([top], dtype=torch.int32), 2**31 - 1)
    assert key.item() == top * (2**31 - 1) + top
