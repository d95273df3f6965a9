"""Small runs are planned by rule, and a dry run that was made is made once."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.engine.base.graph_cache import Graphs
from weft.engine.base.home import STEPS, home
from weft.engine.planning.run_planner import RunPlanner
from weft.planner.grouping.stack_size_table import Throughput
from weft.planner.machine_profiles import profile
from weft.runtime import dry_run

CPU = torch.device("cpu")


@pytest.fixture
def followed(monkeypatch):
    """The groups that were dry-run."""
    made, follow = [], dry_run.capture
    monkeypatch.setattr(dry_run, "capture", lambda tasks, *a, **k: made.append(tasks) or follow(tasks, *a, **k))
    return made


def plans_of(tasks, budget=None):
    return RunPlanner(CPU, Graphs(CPU), budget).groups(tasks, Throughput(""))


def test_a_small_run_makes_no_dry_run_and_says_so(followed):
    (plan,) = plans_of([weft.Task(graph="demo", epochs=50)])
    assert followed == []
    assert plan.cost == {}
    assert plan.why[-1].startswith("no dry run: it surely fits into")


def test_its_groups_are_those_of_a_dry_run(monkeypatch):
    tasks = weft.Sweep("demo", model=["gcn", "gat"], hidden=[8, 16], seed=range(3), epochs=2).tasks()
    quick = plans_of(tasks)
    monkeypatch.setattr("weft.engine.planning.small_run.SMALL_SECONDS", 0.0)
    assert [(p.members, p.stacks, p.join, p.threads) for p in quick] == [
        (p.members, p.stacks, p.join, p.threads) for p in plans_of(tasks)
    ]


def test_what_trains_for_long_has_a_budget_or_is_ones_own_is_dry_run(followed):
    class Own(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.conv = weft.nn.GCNConv(inputs, outputs)

        def forward(self, x, adj):
            return self.conv(x, adj)

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
    (kept,) = (home() / STEPS).iterdir()
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
