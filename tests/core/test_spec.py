"""Spec files: sections flatten, overrides apply, and mistakes are named with their place."""

from __future__ import annotations

import pytest

from weft.core.errors import SpecError
from weft.core.spec import read_spec

SPEC = """
graph = "cora"
seed = 3
[model]
name = "gat"
hidden = 16
[train]
lr = 0.005
epochs = 10
betas = [0.8, 0.9]
"""


@pytest.fixture
def spec(tmp_path):
    def write(text=SPEC, name="my-task.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_sections_flatten_to_fields(spec):
    task = read_spec(spec())
    assert (task.graph, task.seed, task.model, task.hidden) == ("cora", 3, "gat", 16)
    assert (task.lr, task.epochs, task.betas) == (0.005, 10, (0.8, 0.9))
    assert task.name == "my-task"


def test_the_model_may_be_one_word(spec):
    assert read_spec(spec('graph = "cora"\nmodel = "sage"')).model == "sage"


def test_overrides(spec):
    changes = ["train.lr=0.5", "model.name=gcn", 'graph="citeseer"', "model.residual=true", "name=other"]
    task = read_spec(spec(), changes)
    assert (task.lr, task.model, task.graph, task.residual, task.name) == (
        0.5,
        "gcn",
        "citeseer",
        True,
        "other",
    )


@pytest.mark.parametrize("change", ["model=sage", "model.name=sage", 'model="sage"'])
def test_overriding_the_model(spec, change):
    assert read_spec(spec(), [change]).model == "sage"
    assert read_spec(spec('graph = "cora"\nmodel = "gcn"'), [change, "model.hidden=5"]).hidden == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph = ", "not valid TOML"),
        ("[model]\nname = 'gcn'", "no graph; add a line such as graph"),
        ('graph = "cora"\n[train]\nlearning_rte = 1', "unknown setting 'train.learning_rte'"),
        ('graph = "cora"\n[model]\nhiden = 1', "unknown setting 'model.hiden'; did you mean 'model.hidden'"),
        ('graph = "cora"\n[model]\nlr = 1', "model.lr is in the wrong place; lr belongs in [train]"),
        ('graph = "cora"\nlr = 1', "lr is in the wrong place; lr belongs in [train]"),
        ('graph = "cora"\n[train]\nseed = 1', "seed belongs at the top"),
        ('graph = "cora"\ntrain = 3', "train = 3 must be a section, written [train]"),
        ('graph = "cora"\nseed = [0, 1]', "seed = [0, 1] is a list; a spec describes one task"),
        ('graph = "cora"\n[train]\nlr = -1', "task 'my-task': lr=-1.0 must be above 0"),
    ],
)
def test_mistakes_in_the_file(spec, text, message):
    with pytest.raises(SpecError) as error:
        read_spec(spec(text))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.lr", "expected key=value"),
        ("=3", "expected key=value"),
        ("a.b.c=3", "expected key=value"),
        ("train.lrr=3", "unknown setting 'train.lrr'; did you mean 'train.lr'"),
        ("graph.x=3", "graph is a single value"),
        ("seed.x=3", "seed is a single value"),
    ],
)
def test_mistakes_in_overrides(spec, change, message):
    with pytest.raises(SpecError) as error:
        read_spec(spec(), [change])
    assert message in str(error.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        read_spec(tmp_path / "nothing.toml")
    with pytest.raises(SpecError, match="is a folder"):
        read_spec(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not valid TOML"):
        read_spec(tmp_path / "binary.toml")


def test_paths_beside_the_spec_are_found(spec, tmp_path):
    (tmp_path / "data.npz").touch()
    (tmp_path / "net.py").touch()
    task = read_spec(spec('graph = "data.npz"\nmodel = "net.py:Net"'))
    assert task.graph == str(tmp_path / "data.npz")
    assert task.model == f"{tmp_path / 'net.py'}:Net"
