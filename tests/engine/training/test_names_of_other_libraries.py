"""What users of PyG and Lightning write out of habit: it works, or one sentence says what to write here."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import weft
from weft.core.errors import GraphError, InputError, SpecError
from weft.core.spec_file import parse_spec

ALIASES = {
    "learning_rate": ("lr", 0.5),
    "num_neighbors": ("fanout", (5, 3)),
    "batch_size": ("batch", 32),
    "hidden_channels": ("hidden", 32),
    "num_layers": ("layers", 2),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_names_of_pyg_are_read_as_those_of_weft(alias, tmp_path):
    name, value = ALIASES[alias]
    expected = weft.Task(graph="demo", **{name: value})
    task = weft.Task(graph="demo", **{alias: value})
    assert (task, task.given) == (expected, expected.given)
    assert expected.with_values(**{alias: value}) == weft.Task.from_dict({"graph": "demo", alias: value}) == expected
    sweep = weft.Sweep("demo", **{alias: [value]}, seed=[0, 1])
    assert [getattr(task, name) for task in sweep] == [value, value]
    assert {name, alias} & sweep.to_dict().keys() == {name}
    entries = weft.Sweep("demo", tasks=[{alias: value}, {"seed": 1}])
    assert getattr(entries.tasks()[0], name) == value
    section = "model" if name in ("hidden", "layers") else "train"
    (tmp_path / "spec.toml").write_text(f'graph = "demo"\n[{section}]\n{alias} = {json.dumps(value)}\n')
    for more in ([], [f"{section}.{alias}={json.dumps(value)}"], [f"{section}.{name}={json.dumps(value)}"]):
        assert weft.read(tmp_path / "spec.toml", overrides=more).with_values(name=None) == expected


def test_a_setting_by_both_names_is_refused():
    for make in (weft.Task, weft.Sweep):
        with pytest.raises(SpecError, match=r"learning_rate is another name of lr; give one of them$"):
            make(graph="demo", learning_rate=0.1, lr=0.2)
    with pytest.raises(SpecError, match=r"hidden is given twice, once as hidden_channels; give it once$"):
        parse_spec({"graph": "demo", "model": {"hidden": 4, "hidden_channels": 5}})
    with pytest.raises(SpecError, match=r"train\.num_layers is in the wrong place; num_layers belongs in \[model\]$"):
        parse_spec({"graph": "demo", "train": {"num_layers": 4}})


def test_other_names_are_errors_that_name_the_setting():
    for make in (weft.Task, weft.Sweep):
        with pytest.raises(SpecError, match=r"unknown setting 'max_epochs'; did you mean 'epochs'\?$"):
            make(graph="demo", max_epochs=1)
    with pytest.raises(SpecError, match=r"unknown setting 'train\.max_epochs'; did you mean 'train\.epochs'\?$"):
        parse_spec({"graph": "demo", "train": {"max_epochs": 1}})


@pytest.mark.parametrize(("name", "value", "setting"), [
    ("criterion", nn.CrossEntropyLoss(), "objective"),
    ("num_epochs", 3, "epochs"),
    ("monitor", "val_loss", "select"),
])  # fmt: skip
def test_so_are_those_that_a_class_of_pyg_would_take_as_arguments(name, value, setting):
    pyg = pytest.importorskip("torch_geometric.nn")
    with pytest.raises(SpecError, match=rf"it has no argument '{name}' \(did you mean '{setting}'\?\); it has hidden"):
        weft.run(weft.Task("demo", pyg.GCN, num_layers=2, **{name: value}), device="cpu", progress=False)


@pytest.mark.parametrize(("name", "what"), [("in_channels", "features"), ("out_channels", "classes")])
def test_sizes_that_the_graph_gives_are_left_out(name, what):
    pyg = pytest.importorskip("torch_geometric.nn")
    with pytest.raises(SpecError, match=f"model_args: {name} is the number of {what} of the graph; leave it out$"):
        weft.run(weft.Task("demo", pyg.GCN, num_layers=2, **{name: 7}), device="cpu", progress=False)


def test_objects_are_shown_in_one_line():
    pyg = pytest.importorskip("torch_geometric.nn")
    long = torch.zeros(40, 40)
    optimizer = torch.optim.Adam([nn.Parameter(long)])
    with pytest.raises(
        SpecError, match=r"optimizer=Adam \( Parameter Group 0 amsgrad: .*… must be one of adam"
    ) as refused:
        weft.Task("demo", optimizer=optimizer)
    assert "\n" not in str(refused.value)
    for make in (lambda: weft.Task((long, long)), lambda: weft.Task("demo", pyg.PNA, num_layers=2, deg=long, foo=3)):
        with pytest.raises(InputError) as refused:
            weft.run(make(), device="cpu", progress=False)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 600


def test_no_list_of_all_names():
    with pytest.raises(SpecError, match=r"unknown setting 'qqqq'; docs/api.md lists") as error:
        weft.Task(graph="demo", qqqq=1)
    assert len(str(error.value)) < 200


def test_a_loss_that_was_not_made_is_refused():
    task = weft.Task(graph="demo", epochs=1, objective=nn.CrossEntropyLoss)
    with pytest.raises(SpecError, match=r"objective CrossEntropyLoss is a class; give an object, CrossEntropyLoss\(\)"):
        weft.run(task, device="cpu", progress=False)


def test_edges_in_one_piece():
    with pytest.raises(GraphError, match=r"two columns of node ids: from_edges\(edge_index\[0\], edge_index\[1\]\)"):
        weft.Graph.from_edges(torch.tensor([[0, 1], [1, 0]]))


def test_a_trained_model_called_as_pyg_calls_its_own():
    graph = weft.load("demo")
    model = weft.run(weft.Task(graph=graph, hidden=4, epochs=1), device="cpu", progress=False).model
    with pytest.raises(InputError, match=r"takes x and an Adjacency \(graph\.adj\), not a Tensor; result\.predict"):
        model(torch.randn(graph.num_nodes, graph.num_features), torch.tensor([[0, 1], [1, 0]]))
