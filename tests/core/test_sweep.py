"""A sweep expands to tasks with names of their own, the same ones every time, and refuses what makes no sense."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.compatibility import function_name
from weft.core.errors import SpecError
from weft.core.search_space import Choice, Range, choice, loguniform, uniform
from weft.core.sweep import Sweep
from weft.core.task import Task


def names(sweep):
    return [task.name for task in sweep.tasks()]


def test_a_grid_is_every_combination_named_by_what_varies():
    sweep = Sweep("cora", model="gcn", epochs=50, hidden=[16, 64], lr=(1e-2, 5e-3), seed=range(3))
    assert len(sweep) == 12
    assert sweep.varying == ("hidden", "lr", "seed")
    assert names(sweep)[:4] == [
        "hidden=16 lr=0.01 seed=0",
        "hidden=16 lr=0.01 seed=1",
        "hidden=16 lr=0.01 seed=2",
        "hidden=16 lr=0.005 seed=0",
    ]
    assert {task.epochs for task in sweep} == {50}
    assert len(set(names(sweep))) == 12


def test_models_in_a_list_and_arrays():
    sweep = Sweep("cora", model=["gcn", "gat"], lr=np.array([0.1, 0.2]))
    assert names(sweep) == ["gcn lr=0.1", "gcn lr=0.2", "gat lr=0.1", "gat lr=0.2"]


def test_a_sweep_of_one():
    assert names(Sweep("cora", model="sage")) == ["sage"]
    assert Sweep("cora", lr=[0.5]).tasks()[0].lr == 0.5
    assert Sweep("cora").varying == ()


def test_a_pair_of_betas_is_one_value():
    assert len(Sweep("cora", betas=(0.9, 0.99))) == 1
    sweep = Sweep("cora", betas=[(0.9, 0.99), [0.8, 0.9]])
    assert [task.betas for task in sweep] == [(0.9, 0.99), (0.8, 0.9)]
    assert names(sweep) == ["betas=0.9/0.99", "betas=0.8/0.9"]


def test_names_have_as_many_digits_as_they_need():
    assert names(Sweep("cora", lr=[0.12341, 0.12342])) == ["lr=0.12341", "lr=0.12342"]
    assert names(Sweep("cora", patience=[None, 5], residual=[True, False]))[0] == "patience=none residual=true"


def test_models_given_as_objects_are_told_apart():
    def net(i, o):
        return None

    other = lambda i, o: None  # noqa: E731
    other.__name__ = "net"
    assert names(Sweep("cora", model=[net, other])) == ["net#1", "net#2"]


def test_partials_are_named_by_what_they_fix():
    def net(in_features, out_features, width, rate=0.0):
        raise NotImplementedError

    models = [partial(net, width=4), partial(net, width=8, rate=0.25), partial(partial(net, width=8), rate=0.5)]
    assert names(Sweep("demo", model=models)) == ["net width=4", "net width=8 rate=0.25", "net width=8 rate=0.5"]
    assert Task(graph="demo", model=models[0]).to_dict()["model"] == "<net width=4>"
    assert function_name(models[0]) == "net"


def test_random_search_is_the_same_every_time():
    def make(drawn_from, **more):
        return Sweep(
            "cora", lr=loguniform(1e-4, 1e-1), dropout=uniform(0, 0.9), samples=8, sample_seed=drawn_from, **more
        )

    assert make(3).tasks() == make(3).tasks()
    assert make(3).tasks() != make(4).tasks()
    assert all(1e-4 <= task.lr <= 1e-1 and 0 <= task.dropout < 0.9 for task in make(3))
    wider = make(3, weight_decay=loguniform(1e-5, 1e-3))
    assert [task.lr for task in wider] == [task.lr for task in make(3)], "a further setting moves no other draw"
    crossed = make(3, seed=[0, 1])
    assert len(crossed) == 16
    assert crossed.tasks()[0].lr == crossed.tasks()[1].lr, "every draw meets every seed"


def test_whole_numbers_and_steps():
    assert all(type(task.hidden) is int for task in Sweep("cora", hidden=loguniform(4, 256), samples=20))
    stepped = Sweep("cora", model="gat", hidden=uniform(16, 64, step=16), samples=4)
    assert sorted(task.hidden for task in stepped) == [16, 32, 48, 64], "four draws, and four values there are"


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 50), st.integers(1, 50), st.booleans(), st.booleans())
def test_draws_stay_inside(share, low, span, log, whole):
    value = Range(low, low + span, log).at(share, whole)
    assert low <= value <= low + span
    assert isinstance(value, int) == whole


def test_every_whole_number_is_equally_likely():
    counts = [0] * 5
    for index in range(1000):
        counts[uniform(0, 4).at(index / 1000, True)] += 1
    assert counts == [200] * 5
    assert [Choice(("a", "b")).at(share, False) for share in (0.0, 0.49, 0.5, 0.99)] == ["a", "a", "b", "b"]


def test_overrides_that_belong_together():
    entries = [{"name": "paper", "model": "gat", "lr": 0.005}, {"lr": [0.1, 0.2]}]
    sweep = Sweep("cora", tasks=entries, seed=[0, 1])
    assert names(sweep) == [
        "paper seed=0",
        "paper seed=1",
        "gcn lr=0.1 seed=0",
        "gcn lr=0.1 seed=1",
        "gcn lr=0.2 seed=0",
        "gcn lr=0.2 seed=1",
    ]
    assert sweep.varying == ("model", "lr", "seed")


def test_from_tasks_gives_the_same_tasks():
    tasks = [Task(graph="cora", hidden=16), Task(graph="cora", hidden=16, seed=2, name="x"), Task(graph="cora", lr=0.5)]
    sweep = Sweep.from_tasks(tasks)
    assert names(sweep) == ["hidden=16 lr=0.01 seed=0", "x", "hidden=64 lr=0.5 seed=0"]
    assert [task.with_values(name=None) for task in sweep] == [task.with_values(name=None) for task in tasks]
    same = [Task(graph="cora", seed=seed, name="a") for seed in (0, 1)]
    assert names(Sweep.from_tasks(same)) == ["a seed=0", "a seed=1"]


@pytest.mark.parametrize(
    "sweep",
    [
        Sweep("cora", model=["gcn", "gat"], hidden=[16, 64], seed=range(2), betas=[(0.9, 0.99), (0.8, 0.9)], name="a"),
        Sweep("cora", lr=loguniform(1e-4, 0.1), hidden=uniform(8, 64, step=8), norm=choice([None, "layer"]), samples=4),
        Sweep("cora", tasks=[{"lr": 0.1, "hidden": [1, 2]}, {"name": "b", "lr": 0.2}], sample_seed=3),
    ],
    ids=["grid", "random", "explicit"],
)
def test_json_round_trip(sweep):
    again = Sweep.from_dict(json.loads(json.dumps(sweep.to_dict())))
    assert again == sweep
    assert again.tasks() == sweep.tasks()


def test_objects_become_descriptions():
    def net(i, o):
        return None

    data = Sweep("cora", model=[net, "gcn"]).to_dict()
    assert data["model"] == ["<net>", "gcn"]
    with pytest.raises(SpecError, match="<net>"):
        Sweep.from_dict(data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "gat", "hidden": [16, 20]}, "task 'hidden=20': hidden=20 must be a multiple of heads=8"),
        ({"hidden": [16, 0], "seed": [0, 1]}, "task 'hidden=0 seed=0': hidden=0 must be at least 1"),
        ({"lr": [0.1, 0.2, 0.1]}, "sweep 'mine': lr lists 0.1 2 times"),
        ({"lr": []}, "lr=[] has no values"),
        ({"betas": []}, "betas=[] has no values"),
        ({"hiden": [1]}, "sweep 'mine': unknown setting 'hiden'; did you mean 'hidden'?"),
        ({"hidden": range(1, 201), "seed": range(200)}, "40,000 tasks (200 x 200) are more than 10,000"),
        ({"samples": 3, "lr": [0.1, 0.2]}, "samples=3, but no setting is drawn"),
        ({"lr": uniform(-0.1, 0.2)}, "sweep 'mine': lr=-0.1 must be above 0"),
        ({"lr": uniform(0.1, 0.2), "hidden": 0}, "hidden=0 must be at least 1"),
        ({"samples": 0, "lr": uniform(0.1, 0.2)}, "samples=0 must be at least 1"),
        ({"model": choice(["gcn", "gat"]), "samples": 3}, "gave only 2 different combinations"),
        ({"tasks": {"lr": 1}}, "must be a list of dicts"),
        ({"tasks": [3]}, "expected a dict of settings"),
        ({"tasks": [{"lrr": 1}]}, "entry of tasks: unknown setting 'lrr'"),
        ({"tasks": [{"lr": 0.1}, {"lr": 0.1}]}, "have the same settings"),
        ({"lr": "fast"}, "lr='fast' must be a number"),
        ({"graph": None}, "graph=None must be a name"),
        ({"lr": {0.1, 0.2}}, "lr is a set; give a list"),
        ({"seed": iter([0, 1])}, "seed is a list_iterator; give a list"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(SpecError) as error:
        Sweep(**{"graph": "cora", "name": "mine", **settings})
    assert message in str(error.value)


def test_more_samples_than_a_sweep_may_have_are_refused_before_any_is_drawn():
    code = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (6, 6)); import weft; "
    code += "weft.Sweep('demo', lr=weft.uniform(0.1, 0.2), samples=10**12)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "1,000,000,000,000 tasks (1000000000000) are more than 10,000" in done.stderr


def test_what_is_drawn_without_samples_is_a_space_for_a_tuner():
    sweep = Sweep("cora", model=["gcn", "gat"], lr=loguniform(1e-3, 1e-1), heads=choice([2, 4]), hidden=16, name="mine")
    with pytest.raises(SpecError, match=r"lr=loguniform.* is drawn; say how often with samples=.* or choose a tuner"):
        sweep.tasks()
    drawn = sweep.space().draw("7")
    assert drawn == sweep.space().draw("7")
    assert set(drawn) == {"model", "lr", "heads"}
    trials = [sweep.trial(sweep.space().draw(str(key)), f"trial {key}") for key in range(20)]
    assert {(task.model, task.hidden) for task in trials} == {("gcn", 16), ("gat", 16)}
    assert all(("heads" in task.given) == (task.model == "gat") for task in trials), "what a GCN does not read, goes"


def test_entries_of_tasks_are_branches_of_the_space():
    entries = [{"model": "gcn", "lr": loguniform(1e-3, 1e-2)}, {"model": "sage", "lr": 0.5}]
    space = Sweep("cora", tasks=entries).space()
    drawn = [space.draw(str(key)) for key in range(20)]
    assert {(each["model"], each["lr"] == 0.5) for each in drawn} == {("gcn", False), ("sage", True)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: uniform(1, 1), "uniform(1, 1): the first number must be below the second"),
        (lambda: loguniform(0, 1), "loguniform(0, 1): a logarithm needs numbers above 0"),
        (lambda: uniform(0, float("nan")), "must be a finite number"),
        (lambda: uniform("a", 1), "'a' must be a finite number"),
        (lambda: uniform(0, 1, step=0), "step=0 must be a number above 0"),
        (lambda: uniform(0, 1, step=3), "step=3 leads out of the range; only 0 would be drawn"),
        (lambda: choice([]), "at least one value"),
        (lambda: choice("gcn"), "expected a list of values"),
        (lambda: Sweep.from_tasks([]), "no tasks"),
    ],
)
def test_mistakes_in_ranges(make, message):
    with pytest.raises(SpecError) as error:
        make()
    assert message in str(error.value)


def test_a_setting_of_all_that_only_some_read_is_theirs_alone():
    sweep = Sweep("cora", model=["gcn", "gat"], heads=4, hidden=16, lr=[0.1, 0.2])
    assert [task.heads for task in sweep] == [8, 8, 4, 4]
    assert ["heads" in task.given for task in sweep] == [False, False, True, True]
    assert sweep.varying == ("model", "lr")
    optimizers = Sweep("cora", optimizer=["sgd", "adam"], momentum=0.9)
    assert [task.momentum for task in optimizers] == [0.9, 0.0]
    assert optimizers.varying == ("optimizer",)


def test_arguments_of_a_model_vary_like_settings():
    args = {"width": [1, 2], "depth": 3, "sizes": [[4, 5]], "rate": uniform(0, 1)}
    sweep = Sweep("cora", model="net.py:Net", model_args=args, samples=2)
    assert sweep.varying == ("model_args.width", "model_args.rate")
    assert [task.model_args["width"] for task in sweep] == [1, 2, 1, 2]
    assert all(task.model_args["sizes"] == (4, 5) and task.model_args["depth"] == 3 for task in sweep)
    assert re.fullmatch(r"width=1 rate=0\.\d+", sweep.tasks()[0].label)
    assert Sweep.from_dict(json.loads(json.dumps(sweep.to_dict()))).tasks() == sweep.tasks()
    assert [task.model_args for task in Sweep.from_tasks(sweep.tasks())] == [task.model_args for task in sweep]
    with pytest.raises(SpecError, match="model_args=3 must be a dict"):
        Sweep("cora", model_args=3)


def test_entries_change_one_argument_and_keep_the_others():
    entries = [{"model_args": {"width": 2}}, {"model_args": {"deep": True}}]
    sweep = Sweep("cora", model="net.py:Net", model_args={"width": 1}, tasks=entries)
    assert [task.model_args for task in sweep] == [{"width": 2}, {"width": 1, "deep": True}]
