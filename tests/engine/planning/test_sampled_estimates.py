"""Plans of very many tasks: some groups are followed, the others extrapolated from them, and the text stays short."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from weft.core.run_options import RunOptions
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.engine import estimator as following
from weft.engine import plan as planning
from weft.engine.home import STEPS, home
from weft.engine.plan import plan
from weft.runtime import dry_run

SWEEP = Sweep("shape:cora", model=["gcn", "sage"], hidden=[8, 16, 64], norm="layer", seed=range(4), epochs=10)


def bound(monkeypatch, tasks: int, members: int, alone: int) -> None:
    """As if so many tasks were many, with so many members of groups and tasks alone that get a dry run."""
    for module in (following, planning):
        monkeypatch.setattr(module, "MAX_TASKS_TO_DRY_RUN", tasks)
    monkeypatch.setattr(following, "MAX_DRY_RUNS", members)
    monkeypatch.setattr(planning, "MAX_SOLO_DRY_RUNS", alone)


@pytest.fixture
def followed(monkeypatch):
    """The numbers of tasks in the steps that were followed."""
    sizes, follow = [], dry_run.capture
    monkeypatch.setattr(dry_run, "capture", lambda tasks, *a, **k: sizes.append(len(tasks)) or follow(tasks, *a, **k))
    return sizes


def test_few_tasks_are_all_followed(followed):
    report = plan(SWEEP, machine="cpu")
    assert sum(size for size in followed if size > 1) == len(SWEEP)
    assert all(task.cost is not None for task in report.tasks)


def test_tasks_like_a_followed_one_have_its_estimate(monkeypatch):
    bound(monkeypatch, tasks=3, members=8, alone=2)
    tasks = [
        Task(graph="shape:cora", model="gcn", hidden=hidden, name=f"{hidden}-{seed}", seed=seed)
        for seed in (0, 1)
        for hidden in (8, 16, 64)
    ]
    report = plan(tasks, machine="cpu", options=RunOptions(weave="off"))
    known = [task.name for task in report.tasks if task.cost is not None]
    assert known == ["8-0", "16-0", "8-1", "16-1"], "not only those before the first that is one too many"


def test_many_tasks_are_extrapolated_from_some(followed, monkeypatch):
    exact = plan(SWEEP, machine="cpu")
    followed.clear()
    shutil.rmtree(home() / STEPS)  # the steps that are remembered
    bound(monkeypatch, tasks=8, members=8, alone=2)
    report = plan(SWEEP, machine="cpu")
    assert sorted(followed) == [1, 1, 4, 4], "one group of every kind, and two tasks alone"
    assert [group.plan.members for group in report.groups] == [group.plan.members for group in exact.groups]
    for group, other in zip(report.groups, exact.groups, strict=True):
        assert group.cost.total_bytes == pytest.approx(other.cost.total_bytes, rel=0.5)
        assert group.cost.epoch_seconds == pytest.approx(other.cost.epoch_seconds, rel=0.5)
        if "extrapolated from group" in group.note:
            assert group.cost.uncorrected == {}, "nothing to learn from"
        else:
            assert replace(group.cost, process_bytes=other.cost.process_bytes) == other.cost, "the process itself grows"
    assert sum("extrapolated from group" in group.note for group in report.groups) == 4
    assert sum(task.cost is not None for task in report.tasks) == 8
    assert report.to_dict()["tasks"][-1]["cost"] is None
    assert "extrapolated from group" in str(report)
    assert "4 of " in report.notes[0]
    assert "groups are extrapolated from others" in report.notes[0]


def test_what_may_not_fit_is_followed(followed, monkeypatch):
    bound(monkeypatch, tasks=8, members=8, alone=12)
    plan(SWEEP, machine="cpu", budget="100MiB")
    assert len([size for size in followed if size > 1]) > 2


def test_heads_that_take_much_more_than_the_rule_of_thumb_are_followed(monkeypatch):
    bound(monkeypatch, tasks=1, members=0, alone=1)
    heads = [{"name": "one", "heads": 1, "hidden": 256}, {"name": "many", "heads": 64, "hidden": 64}]
    sweep = Sweep(
        "shape:reddit", model="gat", epochs=10, precision="bf16", mode="full", tasks=heads
    )  # writes coefficients [E, heads]
    report = plan(sweep, machine="h200", budget="20GiB")
    fits = {name: group.fits for group in report.groups for name in group.plan.members}
    assert fits == {"one": True, "many": False}


def test_tasks_that_train_alone_may_be_extrapolated(monkeypatch):
    bound(monkeypatch, tasks=2, members=1, alone=1)
    report = plan(Sweep("shape:ogbn-arxiv", model="gcn", hidden=[8, 16, 24, 32]), machine="cpu")
    assert [len(group.plan.members) for group in report.groups] == [1, 1, 1, 1]
    assert [task.parameters is None for task in report.tasks] == [group.extrapolated for group in report.groups]
    assert any(group.extrapolated for group in report.groups)
