"""Small runs are planned by rule, and a dry run that was made is made once."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.engine.graphs import Graphs
from weft.engine.home import STEPS, home
from weft.engine.run_planner import RunPlanner
from weft.planner.machine_profiles import profile
from weft.runtime import dry_run

CPU = torch.device("cpu")


@pytest.fixture
def followed(monkeypatch):
    """The groups that were dry-run."""
    made, follow = [], dry_run.capture
    monkeypatch.setattr(dry_run, "capture", lambda tasks, *a, **k: made.append(tasks) or follow(tasks, *a, **k))
    return made


class Own(nn.Module):
    """A user's module."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = weft.nn.GCNConv(inputs, outputs)

    def forward(self, x, adj):
        return self.conv(x, adj)


def plans_of(tasks, budget=None):
    return RunPlanner(CPU, Graphs(CPU), weft.RunOptions(budget=budget)).groups(tasks)


def test_a_small_run_makes_no_dry_run_and_says_so(followed):
    (plan,) = plans_of([weft.Task(graph="demo", epochs=50)])
    assert followed == []
    assert plan.cost == {}
    assert plan.why[-1].startswith("no dry run: it surely fits into")


def test_its_groups_are_those_of_a_dry_run(monkeypatch):
    tasks = weft.Sweep("demo", model=["gcn", "gat"], hidden=[8, 16], seed=range(3), epochs=2).tasks()
    quick = plans_of(tasks)
    monkeypatch.setattr("weft.engine.run_planner.SMALL_SECONDS", 0.0)
    assert [(p.members, p.stacks, p.join, p.threads) for p in quick] == [
        (p.members, p.stacks, p.join, p.threads) for p in plans_of(tasks)
    ]


def test_what_trains_for_long_has_a_budget_or_is_ones_own_is_dry_run(followed):
    plans_of([weft.Task(graph="demo", epochs=10_000_000)])
    plans_of([weft.Task(graph="demo", layers=3, epochs=2)], budget=2**30)
    plans_of([weft.Task(graph=tiny_graph(), model=Own, epochs=2)])
    assert len(followed) == 3


def test_a_dry_run_is_made_once_a_structure_and_graph(followed):
    task = weft.Task(graph="shape:cora", model="gcn", hidden=16)
    first, again = (weft.plan(task.with_values(lr=lr, seed=i), machine="h200") for i, lr in enumerate((0.1, 0.01)))
    assert len(followed) == 1
    assert first.groups[0].cost == again.groups[0].cost
    assert first.groups[0].plan.weights == again.groups[0].plan.weights
    weft.plan(task.with_values(hidden=32), machine="h200")
    weft.plan(task, machine="cpu")
    weft.plan(task.with_values(graph="shape:citeseer"), machine="h200")
    assert len(followed) == 4


def test_a_run_knows_what_was_planned(followed):
    task = weft.Task(graph="demo", epochs=3)
    foreseen = weft.plan(task, machine="cpu").groups[0].plan.cost["peak_bytes"]
    (plan,) = plans_of([task])
    assert plan.cost["peak_bytes"] == foreseen
    assert len(followed) == 1


def test_a_step_that_cannot_be_read_is_captured_again(followed):
    task = weft.Task(graph="shape:cora")
    weft.plan(task, machine="h200")
    (kept,) = (home() / STEPS).glob("*.json.gz")
    kept.write_bytes(kept.read_bytes()[:100])
    weft.plan(task, machine="h200")
    kept.write_bytes(gzip.compress(json.dumps({"step": {}}).encode()))
    weft.plan(task, machine="h200")
    assert len(followed) == 3


def test_a_registered_model_is_not_remembered(followed):
    from weft.core.models import BUILT_IN

    traits = BUILT_IN["gcn"]
    from dataclasses import replace

    with weft.nn.register_model(replace(traits, name="mine"), weft.nn.GCN):
        weft.plan(weft.Task(graph="shape:cora", model="mine"), machine=profile("h200"))
    assert not (home() / STEPS).exists()


def test_users_modules_are_not_remembered_by_their_name(followed):
    """Another module of the same name, or the same one after an edit, takes other memory."""
    graph = tiny_graph()

    def wider(inputs, outputs):
        return nn.Sequential(nn.Linear(inputs, 512), nn.Linear(512, outputs))

    def narrow(inputs, outputs):
        return nn.Sequential(nn.Linear(inputs, 2), nn.Linear(2, outputs))

    costs = []
    for model in (narrow, wider):
        model.__name__ = model.__qualname__ = "Net"
        costs.append(plans_of([weft.Task(graph=graph, model=model, epochs=2)])[0].cost["peak_bytes"])
    assert costs[1] > 2 * costs[0]
    assert len(followed) == 2
    assert not (home() / STEPS).exists()


@pytest.mark.parametrize("count", [2, 4])
def test_a_sweep_of_a_users_module_makes_two_dry_runs(followed, count):
    """Of one task and of all of them: what they take together is not worked out from a step of two as well."""
    graph = tiny_graph()
    tasks = [weft.Task(graph=graph, model=Own, seed=seed, epochs=2, name=str(seed)) for seed in range(count)]
    planner = RunPlanner(CPU, Graphs(CPU))
    (plan,) = planner.groups(tasks)
    assert len(plan.members) == count
    assert [1 if isinstance(made, weft.Task) else len(made) for made in followed] == [1, count]
    planner._estimator.kernels(tasks, plan)  # what compiles kernels ahead
    planner.weights(tasks[0])
    assert len(followed) == 2


def test_a_sweep_that_may_not_fit_is_worked_out_from_a_step_of_two(followed):
    graph = tiny_graph()
    tasks = [weft.Task(graph=graph, model=Own, seed=seed, epochs=2, name=str(seed)) for seed in range(4)]
    planner = RunPlanner(CPU, Graphs(CPU))
    alone = planner._estimator.alone(tasks[0]).cost.total_bytes
    plans = plans_of(tasks, budget=int(2.5 * alone))
    assert all(plan.cost["total_bytes"] <= 2.5 * alone for plan in plans)
    assert any(len(made) == 2 for made in followed if not isinstance(made, weft.Task))
