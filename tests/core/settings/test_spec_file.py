"""Spec files: sections flatten, overrides apply, and mistakes are named with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.core.errors import SpecError
from weft.core.spec_file import read_spec
from weft.core.sweep import Sweep
from weft.core.task import Task

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
        ('graph = "cora"\n[model]\nmodel = "gcn"', "in [model] the model is called name"),
        ('graph = "cora"\nmodel = "gcn"\n[model]\nhidden = 8', "beside a section [model] the model is its name="),
        ('graph = "cora"\n[train]\nseed = 1', "seed belongs at the top"),
        ('graph = "cora"\ntrain = 3', "train = 3 must be a section, written [train]"),
        ('graph = "cora"\nseed = []', "sweep 'my-task': seed=[] has no values"),
        ('graph = "cora"\nseed = [1, 1]', "seed lists 1 2 times"),
        ('graph = "cora"\ntask = 3', "must be tables, each written [[task]]"),
        ('graph = "cora"\nsweep = 3', "must be a section, written [sweep]"),
        ('graph = "cora"\n[sweep]\nsample = 3', "unknown setting 'sweep.sample'; known here: samples, sample_seed"),
        ('graph = "cora"\n[[task]]\nbogus = 3', "[[task]]: unknown setting 'bogus'; docs/api.md lists the settings"),
        ('graph = "cora"\n[[task]]\nhiden = 3', "[[task]]: unknown setting 'hiden'; did you mean"),
        ('graph = "cora"\n[train]\nlr = { normal = [0, 1] }', "expected one of uniform, loguniform, choice"),
        ('graph = "cora"\n[train]\nlr = { uniform = [1] }', "expected the two ends of the range"),
        ('graph = "cora"\n[train]\nlr = { uniform = [-0.1, 1] }', "sweep 'my-task': lr=-0.1 must be above 0"),
        ('graph = "cora"\n[tune]\ntuner = "asha"', "has a section [tune], which `weft tune` and `weft plan` read"),
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


SWEEP = """
graph = "cora"
seed = [0, 1]
[model]
name = ["gcn", "gat"]
norm = ["none", "layer"]
[train]
lr = { loguniform = [1e-4, 1e-1] }
betas = [[0.9, 0.999], [0.8, 0.99]]
[sweep]
samples = 3
"""


def test_lists_and_ranges_make_a_sweep(spec):
    sweep = read_spec(spec(SWEEP))
    assert isinstance(sweep, Sweep)
    assert (sweep.name, len(sweep)) == ("my-task", 3 * 2 * 2 * 2 * 2)
    assert sweep.varying == ("model", "norm", "lr", "betas", "seed")
    assert {task.norm for task in sweep} == {None, "layer"}
    assert all(1e-4 <= task.lr <= 1e-1 for task in sweep)


def test_overrides_make_a_sweep_and_unmake_one(spec):
    changes = ["model.hidden=[16, 64]", "train.dropout=0.1"]
    with pytest.raises(SpecError, match=r"wrong place; dropout belongs in \[model\]"):
        read_spec(spec(), changes)
    sweep = read_spec(spec(), ["model.hidden=[16, 64]", "train.lr={uniform=[0.1, 0.2]}", "sweep.samples=2"])
    assert [task.hidden for task in sweep] == [16, 64, 16, 64]
    assert isinstance(read_spec(spec('graph = "cora"\nmodel = ["gcn", "gat"]'), ["model=gcn"]), Task)
    assert len(read_spec(spec('graph = "cora"\nmodel = { choice = ["gcn", "gat"] }\n[sweep]\nsamples = 2'))) == 2


def test_tables_of_tasks(spec):
    text = """
graph = "cora"
seed = [0, 1]
[[task]]
name = "paper"
model = "gat"
lr = 0.005
[[task]]
model.hidden = [16, 32]
train.lr = 0.01
"""
    tasks = read_spec(spec(text)).tasks()
    expected = ["paper seed=0", "paper seed=1", "gcn lr=0.01 hidden=16 seed=0", "gcn lr=0.01 hidden=16 seed=1"]
    assert [task.name for task in tasks[:4]] == expected
    assert (tasks[0].model, tasks[0].lr, tasks[0].hidden) == ("gat", 0.005, 64)
    assert len(tasks) == 6


EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_can_be_read(path):
    work = read_spec(path)
    assert isinstance(work, Task if path.stem not in ("demo", "random-search", "relations", "sampled") else Sweep)
    if path.stem == "demo":
        assert len(work) == 16


def test_arguments_of_a_model_are_a_table_of_their_own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('graph = "demo"\n[model]\nname = "net.py:Net"\nhidden = 8\n[model.args]\nwidth = 3\n')
    task = read_spec(path)
    assert (task.hidden, task.model_args) == (8, {"width": 3})
    assert read_spec(path, ["model.args.width=4", "model.args.deep=true"]).model_args == {"width": 4, "deep": True}
    sweep = read_spec(path, ["model.args.width=[1, 2]"])
    assert [one.model_args["width"] for one in sweep] == [1, 2]
    drawn = read_spec(path, ["model.args.width={ choice = [1, 2] }", "sweep.samples=2"])
    assert sorted(one.model_args["width"] for one in drawn) == [1, 2]
