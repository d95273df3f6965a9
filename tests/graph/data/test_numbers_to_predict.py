"""Labels that are numbers to predict: found by their type, kept in files, split where they are known."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.core.errors import GraphError
from weft.graph import Graph

EDGES = {"src": [0, 1, 2, 3], "dst": [1, 2, 3, 0], "x": torch.eye(4)}
Y = [0.5, 1.0, float("nan"), -2.0]


@pytest.mark.parametrize("y", [Y, torch.tensor(Y), torch.tensor(Y)[:, None], torch.tensor(Y, dtype=torch.float64)])
def test_fractions_are_numbers_to_predict(y):
    graph = Graph.from_edges(**EDGES, y=y)
    assert graph.regression
    assert not graph.multilabel
    assert (graph.y.dtype, graph.y.shape, graph.num_classes) == (torch.float32, (4,), 1)
    assert graph.stats().regression
    assert "a number to predict" in repr(graph)
    graph.verify()


def test_a_column_of_floats_is_one_whatever_its_values():
    assert Graph.from_edges(**EDGES, y=torch.tensor([[0.0], [1.0], [2.0], [3.0]])).regression
    assert not Graph.from_edges(**EDGES, y=torch.tensor([[0], [1], [2], [1]])).regression
    with pytest.raises(GraphError, match="class numbers"):
        Graph.from_edges(**EDGES, y=torch.tensor([0.0, 1.0, 2.0, 1.0]))
    with pytest.raises(GraphError, match="class numbers"):  # as OGB writes classes of nodes that some lack
        Graph.from_edges(**EDGES, y=torch.tensor([[0.0], [1.0], [float("nan")], [1.0]]))


SEVERAL = torch.tensor([[0.5, 1.0], [1.0, 0.0], [float("nan"), 3.0], [-2.0, 4.0]])


@pytest.mark.parametrize("y", [SEVERAL, SEVERAL.double().numpy(), torch.tensor([[2.5, 0.0], [1.0, 1.0]] * 2)])
def test_several_numbers_per_node(y, tmp_path):
    graph = Graph.from_edges(**EDGES, y=y)
    assert graph.regression
    assert not graph.multilabel
    assert (graph.y.dtype, graph.y.shape, graph.num_classes) == (torch.float32, (4, 2), 2)
    assert (graph.stats().regression, graph.stats().multilabel, graph.stats().num_classes) == (True, False, 2)
    assert "2 numbers to predict" in repr(graph)
    graph.verify()
    graph.save(tmp_path / "g")
    again = weft.load(tmp_path / "g", verify=True)
    assert again.regression
    assert again.stats() == graph.stats()
    assert Graph.from_pyg(graph.to_pyg()).regression


def test_zeros_and_ones_are_labels_and_other_whole_numbers_are_refused():
    assert Graph.from_edges(**EDGES, y=torch.tensor([[0.0, 1.0]] * 4)).multilabel
    with pytest.raises(GraphError, match=r"y\[0, 1\] = 2.0: a label matrix"):
        Graph.from_edges(**EDGES, y=torch.tensor([[0, 2]] * 4))
    with pytest.raises(GraphError, match="scale numbers to predict if all of them are whole"):
        Graph.from_edges(**EDGES, y=torch.tensor([[0.0, 2.0]] * 4))
    with pytest.raises(GraphError, match=r"y\[1, 0\] is inf: numbers to predict are finite"):
        Graph.from_edges(**EDGES, y=torch.tensor([[0.5, 2], [float("inf"), 1], [0, 0], [0, 0]]))
    with pytest.raises(GraphError, match="num_classes=3 but y has 2 numbers per node"):
        Graph.from_edges(**EDGES, y=SEVERAL, num_classes=3)


def test_nodes_that_lack_one_of_several_numbers_are_in_no_split():
    graph = Graph.from_edges(**EDGES, y=SEVERAL)
    assert 2 not in torch.cat([getattr(graph.random_split(0.4, 0.3), name) for name in ("train", "val", "test")])
    with pytest.raises(GraphError, match=r"node 2 of the val split has no label \(y = \[nan, 3.0\]\)"):
        graph.with_splits(train=[0], val=[2])


def test_nodes_without_a_number_are_in_no_split():
    graph = Graph.from_edges(**EDGES, y=Y)
    assert 2 not in torch.cat([getattr(graph.random_split(0.4, 0.3), name) for name in ("train", "val", "test")])
    with pytest.raises(GraphError, match="node 2 of the val split has no label"):
        graph.with_splits(train=[0], val=[2])


def test_kept_in_a_folder(tmp_path):
    graph = Graph.from_edges(**EDGES, y=Y, train=[0, 1], val=[3])
    graph.save(tmp_path / "g")
    again = weft.load(tmp_path / "g")
    assert again.regression
    assert torch.equal(again.y.nan_to_num(9.0), graph.y.nan_to_num(9.0))
    assert again.stats() == graph.stats()
    again.verify()
