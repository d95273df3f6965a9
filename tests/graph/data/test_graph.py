"""What a user holds and can ask of a Graph."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.graphs_for_tests import assert_same, small_graph
from weft.core.errors import GraphError
from weft.graph import Graph, SparseFeatures


def test_sizes_and_types():
    graph = small_graph()
    assert (graph.num_nodes, graph.num_edges, graph.num_features, graph.num_classes) == (6, 7, 3, 3)
    assert (graph.num_relations, graph.multilabel, graph.device.type) == (2, False, "cpu")
    assert graph.y.dtype == graph.train.dtype == graph.edge_index().dtype == torch.int64
    assert graph.test.tolist() == [3, 5]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda ids: np.array(ids, dtype=np.uint16)])
def test_edges_may_be_lists_arrays_or_tensors(kind):
    graph = Graph.from_edges(kind([2, 0]), kind([0, 1]))
    assert graph.edge_index().tolist() == [[2, 0], [0, 1]]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.dtype(">i4"), np.uint64])
def test_ids_of_any_integer_type_may_belong_to_a_graph_larger_than_the_type(dtype):
    ids = np.arange(100).astype(dtype)
    graph = Graph.from_edges(ids, ids[::-1], num_nodes=70_000, relation=ids, train=ids)
    assert graph.edge_index()[1].tolist() == list(range(100))
    assert graph.relation.tolist() == list(range(99, -1, -1))
    assert graph.train.numel() == 100


def test_num_nodes_is_found_where_it_is_not_given():
    assert Graph.from_edges([0], [4]).num_nodes == 5
    assert Graph.from_edges([0], [1], x=np.eye(7)).num_nodes == 7
    assert Graph.from_edges([0], [1], y=[0, 1, 0]).num_nodes == 3


def test_no_edges_are_fine():
    graph = Graph.from_edges([], [], num_nodes=3)
    assert graph.num_edges == 0
    assert graph.stats().degree_histogram == (3,)
    assert Graph.from_edges([], [], num_nodes=3, directed=False, edge_weight=[]).num_edges == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sparse", [False, True])
def test_half_precision_and_sparse_features_stay_so(dtype, sparse):
    graph = small_graph(sparse=sparse, dtype=dtype)
    assert graph.x.dtype == dtype
    assert isinstance(graph.x, SparseFeatures) == sparse
    assert graph.stats().feature_dtype == str(dtype).removeprefix("torch.")
    assert graph.stats().feature_nnz == (6 if sparse else None)


def test_features_of_the_right_type_are_shared_and_others_become_float32():
    x = torch.rand(2, 3)
    assert Graph.from_edges([0], [1], x=x).x.data_ptr() == x.data_ptr()
    assert Graph.from_edges([0], [1], x=np.eye(2)).x.dtype == torch.float32
    assert Graph.from_edges([0], [1], x=np.eye(2, dtype=bool)).x.dtype == torch.float32


def test_read_only_arrays_are_taken_without_a_warning():
    x = np.eye(2, dtype=np.float32)
    x.setflags(write=False)
    assert Graph.from_edges([0], [1], x=x).num_features == 2


@pytest.mark.parametrize("convert", [sp.csr_matrix, sp.coo_array, sp.csc_array])
def test_scipy_features_stay_sparse(convert):
    x = np.array([[0, 1.5], [2, 0], [0, 0]])
    graph = Graph.from_edges([0], [1], x=convert(x))
    assert isinstance(graph.x, SparseFeatures)
    np.testing.assert_array_equal(graph.x.to_dense().numpy(), x)


@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_torch_sparse_features_stay_sparse(layout):
    x = torch.tensor([[0, 1.5], [2, 0], [0, 0]])
    graph = Graph.from_edges([0], [1], x=getattr(x, layout)())
    assert isinstance(graph.x, SparseFeatures)
    assert torch.equal(graph.x.to_dense(), x)


def test_labels_of_several_kinds():
    assert Graph.from_edges([0], [1], y=np.array([[2], [0]])).y.tolist() == [2, 0]
    many = Graph.from_edges([0], [1], y=[[1, 0, 1], [0, 0, 1]])
    assert many.multilabel
    assert many.num_classes == 3
    assert many.y.dtype == torch.float32
    assert Graph.from_edges([0], [1], y=[0, 1], num_classes=5).num_classes == 5
    assert Graph.from_edges([0], [1]).num_classes == 0


def test_stats_are_what_the_graph_is_and_are_kept():
    graph = small_graph()
    stats = graph.stats()
    assert stats is graph.stats()
    assert (stats.num_nodes, stats.num_edges, stats.max_degree) == (6, 7, 2)
    assert stats.degree_histogram == (1, 3, 2)
    assert (stats.num_train, stats.num_val, stats.num_test) == (2, 1, 2)
    assert (stats.weighted, stats.symmetric, stats.num_relations) == (True, False, 2)


@given(st.lists(st.integers(0, 2**40), max_size=20))
def test_degree_histogram_counts_bit_lengths(degrees):
    from weft.graph.graph import degree_histogram

    histogram = degree_histogram(torch.tensor(degrees, dtype=torch.int64))
    assert sum(histogram) == len(degrees)
    for bits, count in enumerate(histogram):
        assert count == sum(degree.bit_length() == bits for degree in degrees)


def test_repr_tells_what_it_is():
    text = repr(small_graph(sparse=True))
    for part in (
        "small",
        "6 nodes",
        "7 edges",
        "directed",
        "weighted",
        "2 relations",
        "3 features",
        "sparse",
    ):
        assert part in text
    assert "train/val/test 2/1/2" in text
    assert "classes" not in repr(Graph.from_edges([0], [1]))


def test_from_csr_is_the_same_graph():
    graph = small_graph()
    again = Graph.from_csr(
        graph.adj.indptr,
        graph.adj.indices,
        x=graph.x,
        y=graph.y,
        train=graph.train,
        val=graph.val,
        test=graph.test,
        edge_weight=graph.edge_weight,
        relation=graph.relation,
        name="small",
    )
    assert_same(again, graph)
    assert again.adj.indices.data_ptr() == graph.adj.indices.data_ptr()


def test_from_csr_finds_symmetry_or_takes_your_word():
    graph = Graph.from_edges([0, 1, 2], [1, 2, 0], directed=False)
    assert Graph.from_csr(graph.adj.indptr, graph.adj.indices).adj.symmetric
    assert not Graph.from_csr(graph.adj.indptr, graph.adj.indices, symmetric=False).adj.symmetric
    assert Graph.from_csr([0, 1, 2], [1, 0], edge_weight=[1.0, 2.0], symmetric=None).adj.symmetric is False


def test_moving_to_where_it_is_gives_itself():
    graph = small_graph()
    assert graph.to("cpu") is graph
    meta = small_graph(sparse=True).to("meta")
    assert meta.x.device.type == meta.y.device.type == meta.train.device.type == meta.relation.device.type == "meta"


def test_verify_passes_good_graphs_and_finds_bad_values():
    graph = small_graph(sparse=True)
    assert graph.verify() is graph
    graph.adj.indices[2] = 77
    with pytest.raises(GraphError, match=r"indices\[2\] = 77"):
        graph.verify()


def test_verify_finds_false_symmetry_and_broken_sparse_features():
    graph = Graph.from_csr([0, 0, 1], [0], symmetric=True)
    with pytest.raises(GraphError, match="differs from its transpose"):
        graph.verify()
    graph = small_graph(sparse=True)
    graph.x.matrix.indices[0] = 9
    with pytest.raises(GraphError, match=r"x_indices\[0\] = 9"):
        graph.verify()
