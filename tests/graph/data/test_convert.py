"""Other libraries' graphs. DGL need not be installed: an object of the same shape stands in for its graphs."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs_for_tests import assert_same, dense_adjacency, small_graph
from weft.core.errors import GraphError
from weft.graph import Graph

Data = pytest.importorskip("torch_geometric.data").Data


class StandInForDGL:
    """What ``Graph.from_dgl`` uses of a DGL graph."""

    def __init__(self, src, dst, nodes, ndata=None, edata=None, kinds=(("_N", "_E", "_N"),)):
        self._edges, self._nodes = (torch.tensor(src), torch.tensor(dst)), nodes
        self.ndata, self.edata, self.canonical_etypes = ndata or {}, edata or {}, list(kinds)

    def edges(self):
        return self._edges

    def num_nodes(self):
        return self._nodes


# ---- scipy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [sp.csr_matrix, sp.coo_array, sp.csc_array])
def test_scipy_entry_ij_is_the_edge_i_to_j(convert):
    matrix = convert(np.array([[0, 2.0, 0], [0, 0, 3.0], [0, 0, 0]]))
    graph = Graph.from_scipy(matrix, y=[0, 1, 0], name="s")
    assert graph.edge_index().tolist() == [[0, 1], [1, 2]]
    assert graph.edge_weight.tolist() == [2, 3]
    assert (graph.name, graph.num_classes) == ("s", 2)


def test_scipy_ones_are_no_weights_unless_asked():
    assert Graph.from_scipy(sp.eye_array(3)).edge_weight is None
    assert Graph.from_scipy(sp.eye_array(3), weighted=True).edge_weight.tolist() == [1, 1, 1]
    assert Graph.from_scipy(2 * sp.eye_array(3), weighted=False).edge_weight is None


def test_scipy_must_be_sparse_and_square():
    with pytest.raises(GraphError, match=r"shape \[2, 3\]; an adjacency is square"):
        Graph.from_scipy(sp.coo_array((2, 3)))
    with pytest.raises(GraphError, match="of type ndarray is not a scipy sparse matrix"):
        Graph.from_scipy(np.eye(2))


# ---- PyG ---------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_pyg_round_trip(data):
    nodes = data.draw(st.integers(2, 8))
    ends = st.lists(st.integers(0, nodes - 1), min_size=12, max_size=12)
    weighted, related = data.draw(st.booleans()), data.draw(st.booleans())
    graph = Graph.from_edges(
        data.draw(ends),
        data.draw(ends),
        x=torch.rand(nodes, 3),
        y=[0, 1] * (nodes // 2) + [1] * (nodes % 2),
        train=[0],
        test=[1],
        edge_weight=torch.rand(12) if weighted else None,
        relation=torch.arange(12) % 3 if related else None,
        directed=data.draw(st.booleans()) if not (weighted or related) else True,
    )
    assert_same(Graph.from_pyg(graph.to_pyg()), graph)


def test_pyg_sees_the_same_graph():
    data = small_graph(sparse=True).to_pyg()
    data.validate()
    assert data.num_nodes == 6
    assert data.x.layout == torch.strided
    assert data.train_mask.nonzero().flatten().tolist() == [0, 2]
    assert data.edge_type.dtype == torch.int64


def test_pyg_columns_of_masks_and_edge_attributes():
    masks = torch.tensor([[True, False], [False, True]])
    edges = torch.tensor([[0], [1]])
    graph = Graph.from_pyg(
        Data(edge_index=edges, train_mask=masks, num_nodes=2, edge_attr=torch.tensor([[2.5]])), split=1
    )
    assert graph.train.tolist() == [1]
    assert graph.edge_weight.tolist() == [2.5]
    wide = Data(edge_index=edges, num_nodes=2, edge_attr=torch.ones(1, 4))
    assert Graph.from_pyg(wide).edge_weight is None
    with pytest.raises(GraphError, match="split=7: train_mask has 2 columns"):
        Graph.from_pyg(Data(edge_index=edges, train_mask=masks, num_nodes=2), split=7)


def test_pyg_transposed_sparse_adjacency():
    stored = torch.tensor([[0, 0, 3.0], [2.0, 0, 0], [0, 0, 0]]).to_sparse()
    graph = Graph.from_pyg(Data(adj_t=stored, num_nodes=3))
    assert dense_adjacency(graph).tolist() == stored.to_dense().tolist()


def test_pyg_what_is_not_one_graph_is_refused():
    from torch_geometric.data import HeteroData

    with pytest.raises(GraphError, match="to_homogeneous"):
        Graph.from_pyg(HeteroData())
    with pytest.raises(GraphError, match=r"of type list is not one PyG graph.*dataset\[0\]"):
        Graph.from_pyg([Data()])
    with pytest.raises(GraphError, match="neither edge_index nor adj_t"):
        Graph.from_pyg(Data(num_nodes=3))


def test_without_pyg_there_is_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(GraphError, match="pip install torch-geometric"):
        small_graph().to_pyg()


# ---- DGL ---------------------------------------------------------------------------------------------


def test_dgl_edges_data_and_masks():
    node_data = {
        "feat": torch.eye(3),
        "label": torch.tensor([0, 1, 2]),
        "train_mask": torch.tensor([1, 0, 0], dtype=torch.uint8),
        "test_mask": torch.tensor([False, True, False]),
    }
    edge_data = {"weight": torch.tensor([0.5, 2.0]), "_TYPE": torch.tensor([0, 1])}
    graph = Graph.from_dgl(StandInForDGL([0, 2], [1, 0], 3, node_data, edge_data), name="d")
    assert graph.edge_index().tolist() == [[2, 0], [0, 1]]
    assert graph.edge_weight.tolist() == [2.0, 0.5]
    assert graph.relation.tolist() == [1, 0]
    assert (graph.train.tolist(), graph.val.tolist(), graph.test.tolist()) == ([0], [], [1])
    assert (graph.num_features, graph.num_classes, graph.name) == (3, 3, "d")


def test_dgl_other_names_and_bare_graphs():
    graph = Graph.from_dgl(StandInForDGL([0], [1], 2, {"h": torch.eye(2)}), x="h")
    assert graph.num_features == 2
    assert graph.y is None


def test_dgl_what_is_not_a_dgl_graph_is_refused():
    with pytest.raises(GraphError, match="of type SimpleNamespace is not a DGL graph"):
        Graph.from_dgl(SimpleNamespace(edges=None))
    several = StandInForDGL([0], [1], 2, kinds=[("a", "b", "c"), ("a", "d", "c")])
    with pytest.raises(GraphError, match=r"2 edge types; .*to_homogeneous"):
        Graph.from_dgl(several)


# ---- networkx ----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**16), st.booleans())
def test_networkx_has_the_same_matrix(nodes, seed, directed):
    theirs = nx.gnp_random_graph(nodes, 0.3, seed=seed, directed=directed)
    graph = Graph.from_networkx(theirs)
    np.testing.assert_array_equal(dense_adjacency(graph), nx.to_numpy_array(theirs).T)
    assert graph.adj.symmetric or directed


def test_networkx_names_attributes_and_weights():
    theirs = nx.Graph()
    theirs.add_node("a", x=[1.0, 2.0], y=1)
    theirs.add_node("b", x=[3.0, 4.0], y=0)
    theirs.add_edge("a", "b", weight=0.5)
    graph = Graph.from_networkx(theirs, train=[0], name="n")
    assert graph.x.tolist() == [[1, 2], [3, 4]]
    assert graph.y.tolist() == [1, 0]
    assert graph.edge_weight.tolist() == [0.5, 0.5]
    assert (graph.train.tolist(), graph.name) == ([0], "n")


def test_networkx_attributes_must_be_whole():
    theirs = nx.DiGraph([(0, 1), (1, 2)])
    theirs.edges[0, 1]["weight"] = 2.0
    with pytest.raises(GraphError, match=r"edge \(1, 2\) has no 'weight' while others do"):
        Graph.from_networkx(theirs)
    theirs = nx.path_graph(2)
    theirs.nodes[0]["x"], theirs.nodes[1]["x"] = [1.0], [1.0, 2.0]
    with pytest.raises(GraphError, match="the 'x' of the nodes differ in shape"):
        Graph.from_networkx(theirs)
    with pytest.raises(GraphError, match="of type dict is not a networkx graph"):
        Graph.from_networkx({})
