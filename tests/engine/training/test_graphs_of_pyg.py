"""Data, HeteroData and datasets of PyG are graphs as they are."""

from __future__ import annotations

import copy

import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import GraphError, SpecError
from weft.graph.graph import as_graph

pyg = pytest.importorskip("torch_geometric.data")
transforms = pytest.importorskip("torch_geometric.transforms")
SETTINGS = {"hidden": 4, "epochs": 3}


class Dataset(pyg.InMemoryDataset):
    """As Planetoid is one: a list of Data, a name."""

    name = "Cora"

    def __init__(self, items, transform=None):
        super().__init__(transform=transform)
        self.data, self.slices = self.collate(items)


def run(work, **options):
    return weft.run(work, device="cpu", progress=False, **options)


def test_data_trains_and_predicts_as_the_graph_made_of_it():
    data = tiny_graph().to_pyg()
    expected = run(weft.Task(weft.Graph.from_pyg(data), **SETTINGS))
    result = run(weft.Task(data, **SETTINGS))
    assert result.history == expected.history
    for graph in (None, data, Dataset([data])):
        assert torch.equal(result.predict(graph, nodes="test"), expected.predict(nodes="test"))
    assert weft.plan(weft.Task(data, **SETTINGS)).fits
    sweep = run(weft.Sweep(data, lr=[0.1, 0.01], **SETTINGS))
    assert sweep[0].history["loss"] == pytest.approx(run(sweep[0].task).history["loss"])


def test_a_dataset_is_its_one_data():
    dataset = Dataset([tiny_graph().to_pyg()])
    result = run(weft.Task(dataset, **SETTINGS))
    assert result.history == run(weft.Task(tiny_graph().to_pyg(), **SETTINGS)).history
    assert result.trained_on.name == "Cora"
    with pytest.raises(GraphError, match=r"of type Dataset is not one PyG graph; pass one of its items"):
        run(weft.Task(Dataset([tiny_graph().to_pyg()] * 2), **SETTINGS))


def test_masks_of_a_transform_are_those_of_the_first_time():
    dataset = Dataset([tiny_graph().to_pyg()], transforms.RandomNodeSplit(num_val=10, num_test=10))
    assert torch.equal(as_graph(dataset).train, as_graph(dataset).train)


def test_columns_of_masks_are_splits():
    data = transforms.RandomNodeSplit(num_splits=3, num_val=10, num_test=10)(tiny_graph().to_pyg())
    result = run(weft.Sweep(data, splits="all", **SETTINGS))
    assert [member.task.split for member in result] == [0, 1, 2]
    alone = run(weft.Task(data, split=1, **SETTINGS))
    assert alone.history["loss"] == pytest.approx(result[1].history["loss"])


def test_it_is_converted_once_and_again_when_it_changes():
    data = tiny_graph().to_pyg()
    first = as_graph(data)
    assert as_graph(data) is first
    assert first.x.data_ptr() == data.x.data_ptr()
    twin = copy.copy(data)
    twin.train_mask = twin.val_mask
    twin.val_mask = torch.zeros_like(twin.val_mask)
    assert torch.equal(as_graph(twin).train, first.val)
    assert as_graph(data) is first
    data.y[0] = 1 - data.y[0]
    assert as_graph(data).y[0] != tiny_graph().y[0]


def hetero(kinds):
    data = pyg.HeteroData()
    for kind in kinds:
        data[kind].x, data[kind].y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
        data[kind].train_mask = torch.tensor([True, True, False, False])
    for place, name in enumerate(("cites", "follows")):
        data[kinds[0], name, kinds[-1]].edge_index = torch.tensor([[0, 1], [1, 2]]) + place
    return data


def test_types_of_edges_between_nodes_of_one_type_are_relations():
    graph = as_graph(hetero(["paper"]))
    assert (graph.num_relations, graph.notes, graph.train.tolist()) == (2, (), [0, 1])
    assert run(weft.Task(hetero(["paper"]), "rgcn", **SETTINGS)).status == "finished"
    with pytest.raises(
        GraphError, match=r"nodes of 2 types \(paper, author\).*data\.to_homogeneous\(\) makes them one"
    ):
        run(weft.Task(hetero(["paper", "author"]), **SETTINGS))


def test_what_is_no_graph_is_refused():
    with pytest.raises(SpecError, match=r"must be a name, a path, a weft\.Graph, or a Data or dataset of PyG"):
        run(weft.Task(torch.zeros(2, 3), **SETTINGS))
    result = run(weft.Task(tiny_graph(), **SETTINGS))
    with pytest.raises(SpecError, match=r"graph=tensor\(.*\) must be a name, a path, a weft\.Graph"):
        result.predict(torch.zeros(2, 3))
