"""A task checks every field and says which value is wrong, what was expected and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weft.core.errors import SpecError
from weft.core.task import Task


def test_defaults_are_usable_and_frozen():
    task = Task(graph="cora")
    assert (task.model, task.layers, task.hidden, task.epochs, task.lr) == ("gcn", 2, 64, 200, 0.01)
    with pytest.raises(AttributeError):
        task.lr = 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden": 0}, "task 'gcn-3': hidden=0 must be at least 1"),
        ({"layers": 2.5}, "layers=2.5 must be a whole number"),
        ({"epochs": True}, "epochs=True must be a whole number"),
        ({"lr": 0}, "lr=0.0 must be above 0"),
        ({"lr": float("nan")}, "lr=nan must be a finite number"),
        ({"lr": "fast"}, "lr='fast' must be a number"),
        ({"dropout": 1.0}, "dropout=1.0 must be below 1"),
        ({"weight_decay": -1}, "weight_decay=-1.0 must be at least 0"),
        ({"optimizer": "lion"}, "optimizer='lion' must be one of adam, adamw, sgd"),
        ({"schedule": "magic"}, "must be one of constant, cosine, linear, step"),
        ({"norm": "group"}, "norm='group' must be one of batch, layer"),
        ({"residual": 1}, "residual=1 must be true or false"),
        ({"patience": 0}, "patience=0 must be at least 1"),
        ({"betas": (0.9,)}, "betas=(0.9,) must be two numbers"),
        ({"betas": (0.9, 1.0)}, r"betas[1]=1.0 must be below 1"),
        ({"seed": [0, 1, 2]}, "seed=[0, 1, 2] is a list; a task has one value for each setting"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"warmup": 200}, "warmup=200 must be below epochs=200"),
        ({"model": "gat", "hidden": 60}, "hidden=60 must be a multiple of heads=8"),
        ({"model": "gnc"}, "model='gnc' must be one of gcn, sage, gin, gat, gatv2"),
        ({"model": "gcnn"}, "did you mean 'gcn'?"),
        ({"model": 3}, "model=3 must be a name, an nn.Module, or a callable"),
        ({"graph": None}, "graph=None must be a name, a path, a weft.Graph, or a Data"),
        ({"graph": ""}, "graph='' must be a name"),
        ({"name": "a\0b"}, r"name='a\x00b' must be text that a file can hold"),
        ({"name": "\ud800"}, r"name='\ud800' must be text that a file can hold"),
    ],
)
def test_a_bad_value_is_named(values, message):
    with pytest.raises(SpecError) as error:
        Task(**{"graph": "cora", "name": "gcn-3", **values})
    assert message in str(error.value)


def test_values_take_their_proper_type():
    task = Task(graph=Path("some/graph.npz"), lr=1, hidden=np.int64(8), dropout=np.float32(0.5), betas=[0, 0.5])
    assert task.graph == "some/graph.npz"
    assert isinstance(task.lr, float)
    assert type(task.hidden) is int
    assert task.betas == (0.0, 0.5)


def test_json_round_trip():
    task = Task(graph="cora", model="gat", heads=4, betas=(0.8, 0.99), patience=10, name="a")
    assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task


def test_objects_become_descriptions_that_do_not_pass_for_names():
    def tiny(in_features, out_features):
        return None

    data = Task(graph="cora", model=tiny).to_dict()
    assert data["model"] == "<tiny>"
    with pytest.raises(SpecError, match="<tiny>"):
        Task.from_dict(data)


def test_unknown_fields_get_a_close_match():
    with pytest.raises(SpecError, match="unknown setting 'hiden'; did you mean 'hidden'"):
        Task.from_dict({"graph": "cora", "hiden": 3})
    with pytest.raises(SpecError, match="unknown setting 'learning'"):
        Task(graph="cora").with_values(learning=3)


def test_with_values_checks_again():
    assert Task(graph="cora").with_values(lr=0.5).lr == 0.5
    with pytest.raises(SpecError, match="hidden=-1 must be at least 1"):
        Task(graph="cora").with_values(hidden=-1)


def test_a_model_by_import_path_is_allowed():
    assert Task(graph="cora", model="my.models:Net").model_name == "my.models:Net"


@pytest.mark.parametrize("name", ["epochs", "hidden", "heads", "patience", "eval_every"])
def test_numbers_beyond_reason_are_told(name):
    with pytest.raises(SpecError, match=f"{name}=100000000000000000000 must be at most 10,000,000"):
        Task(graph="g", **{name: 10**20})


def test_layers_beyond_reason_are_told():
    assert Task(graph="g", layers=1001).layers == 1001
    with pytest.raises(SpecError, match="layers=1000000 must be at most 10,000"):
        Task(graph="g", layers=1_000_000)
