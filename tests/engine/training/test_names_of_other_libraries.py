"""What users of PyG and Lightning write out of habit: it works, or one sentence says what to write here."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft.core.errors import GraphError, InputError, SpecError
from weft.core.spec_file import parse_spec

NAMES = {
    "learning_rate": "lr",
    "num_neighbors": "fanout",
    "batch_size": "batch",
    "hidden_channels": "hidden",
    "num_layers": "layers",
    "max_epochs": "epochs",
}


@pytest.mark.parametrize(("name", "own"), NAMES.items())
def test_names_of_settings(name, own):
    for make in (weft.Task, weft.Sweep):
        with pytest.raises(SpecError, match=rf"unknown setting '{name}'; did you mean '{own}'\?$"):
            make(graph="demo", **{name: 1})
    for section in ("train", "model"):
        with pytest.raises(SpecError, match=rf"unknown setting '{section}\.{name}'; did you mean '\w+\.{own}'\?$"):
            parse_spec({"graph": "demo", section: {name: 1}})


def test_no_list_of_all_names():
    with pytest.raises(SpecError, match=r"unknown setting 'qqqq'; docs/api.md lists") as error:
        weft.Task(graph="demo", qqqq=1)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, lambda a, b: F.cross_entropy(a, b)])
def test_losses_of_two_arguments_are_over_the_training_rows(loss):
    settings = {"graph": "demo", "hidden": 4, "epochs": 3, "dropout": 0.0}
    found, expected = (
        weft.run(weft.Task(**settings, **more), device="cpu", progress=False)
        for more in ({"objective": loss}, {"objective": "multiclass"})
    )
    assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)


def test_a_loss_that_was_not_made_is_refused():
    task = weft.Task(graph="demo", epochs=1, objective=nn.CrossEntropyLoss)
    with pytest.raises(SpecError, match=r"objective CrossEntropyLoss is a class; give an object, CrossEntropyLoss\(\)"):
        weft.run(task, device="cpu", progress=False)


def test_a_graph_of_pyg_is_refused_at_once():
    data = pytest.importorskip("torch_geometric.data").Data(edge_index=torch.tensor([[0, 1], [1, 0]]))
    with pytest.raises(SpecError, match=r"graph is a Data of PyG; give graph=weft\.Graph\.from_pyg\(data\)"):
        weft.Task(graph=data)


def test_edges_in_one_piece():
    with pytest.raises(GraphError, match=r"two columns of node ids: from_edges\(edge_index\[0\], edge_index\[1\]\)"):
        weft.Graph.from_edges(torch.tensor([[0, 1], [1, 0]]))


def test_a_trained_model_called_as_pyg_calls_its_own():
    graph = weft.load("demo")
    model = weft.run(weft.Task(graph=graph, hidden=4, epochs=1), device="cpu", progress=False).model
    with pytest.raises(InputError, match=r"takes x and an Adjacency \(graph\.adj\), not a Tensor; result\.predict"):
        model(torch.randn(graph.num_nodes, graph.num_features), torch.tensor([[0, 1], [1, 0]]))
