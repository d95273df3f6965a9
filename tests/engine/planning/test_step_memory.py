"""What dry runs found is remembered: kernels for any number of epochs, and no more files than a bound."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

import weft
from weft.core.models import BUILT_IN
from weft.engine import home as home_module
from weft.engine import run_planner as warm_kernels
from weft.engine.estimator import Estimator
from weft.engine.home import STEPS, home, note_kernels
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.machine_profiles import profile
from weft.runtime import dry_run

# Lengths of histories and tables that are 1 or divisible by 16: a version of a kernel could be made for each.
EPOCHS = (40, 1, 2, 12, 13, 16, 200)


@pytest.fixture
def followed(monkeypatch):
    """The groups that were dry-run."""
    made, follow = [], dry_run.capture
    monkeypatch.setattr(dry_run, "capture", lambda tasks, *a, **k: made.append(tasks) or follow(tasks, *a, **k))
    return made


def group_of(task, count=1):
    """So many tasks like ``task``, the plan of them as one group, and an estimator that has seen nothing yet."""
    estimator = Estimator(profile("h200"))
    tasks = [task.with_values(name=f"t{place}", seed=place) for place in range(count)]
    return estimator, tasks, plan_as_one_group(tasks, estimator.stats(task), "cuda")


def captured_kernels(task, count=1):
    """Digests of the kernels of a dry run that is made now."""
    estimator, tasks, plan = group_of(task, count)
    return set(estimator.captured_now(tasks, plan).kernels)


@pytest.mark.parametrize("model", BUILT_IN)
def test_kernels_are_the_same_for_any_number_of_epochs(model):
    graph = "shape:bgs" if BUILT_IN[model].relational else "shape:cora"
    task = weft.Task(graph=graph, model=model, hidden=16, eval_every=3)
    first, *others = (captured_kernels(task.with_values(epochs=epochs), count=2) for epochs in EPOCHS)
    assert first
    assert all(other == first for other in others)


@pytest.mark.parametrize("settings", [{}, {"fanout": (5, 5), "batch": 64}], ids=["whole graph", "sampled"])
def test_kernels_of_one_task_are_the_same_for_any_number_of_epochs(settings):
    task = weft.Task(graph="shape:cora", hidden=16, **settings)
    first, *others = (captured_kernels(task.with_values(epochs=epochs)) for epochs in EPOCHS)
    assert all(other == first for other in others)


def test_another_number_of_epochs_makes_no_dry_run_to_know_the_kernels(followed):
    task = weft.Task(graph="shape:cora", hidden=16)
    found = []
    for epochs in EPOCHS:
        estimator, *group = group_of(task.with_values(epochs=epochs))
        found.append(set(estimator.kernels(*group)))
    assert len(followed) == 1
    assert found == [captured_kernels(task)] * len(EPOCHS)
    estimator, *group = group_of(task.with_values(hidden=32))
    assert set(estimator.kernels(*group)) != found[0]
    assert len(followed) == 3


def test_a_start_whose_kernels_are_compiled_makes_no_dry_run(followed, monkeypatch, tmp_path):
    monkeypatch.setattr(warm_kernels, "have_triton", lambda: True)
    monkeypatch.setattr(warm_kernels, "can_compile_in_parallel", lambda: True)
    monkeypatch.setattr(warm_kernels, "keep_triton_key", lambda folder: None)
    task = weft.Task(graph="shape:cora", hidden=16, epochs=1)
    note_kernels(90, dict.fromkeys(captured_kernels(task), str(tmp_path)))
    del followed[:]
    for epochs in (1, 40, 200):
        estimator, *group = group_of(task.with_values(epochs=epochs))
        assert warm_kernels.warm_kernels(*group, estimator, 90, lambda done, total: None) == 0
    assert len(followed) == 1  # the list is not known before the first start


def test_versions_of_known_kernels_are_there_to_be_compiled(followed):
    task = weft.Task(graph="shape:cora", hidden=16)
    for epochs in (1, 40):
        estimator, *group = group_of(task.with_values(epochs=epochs))
        assert set(estimator.kernels(*group)) <= set(estimator.versions(*group))
    assert len(followed) == 2


def test_merged_launches_have_kernels_per_number_of_epochs(followed):
    task = weft.Task(graph="shape:cora", hidden=16)
    for epochs in (1, 40, 40):
        estimator, tasks, plan = group_of(task.with_values(epochs=epochs), count=2)
        estimator.kernels(tasks, replace(plan, stacks=((0,), (1,)), join="woven"))
    assert len(followed) == 2


@pytest.mark.parametrize("text", ["", "[", '"abc"', "{}"])
def test_a_list_that_cannot_be_read_is_found_in_the_step(followed, text):
    estimator, *group = group_of(weft.Task(graph="shape:cora", hidden=16))
    known = estimator.kernels(*group)
    (kept,) = (home() / STEPS).glob("*.kernels.json")
    assert json.loads(kept.read_text())["value"] == list(known)
    kept.write_text(text)
    estimator, *group = group_of(weft.Task(graph="shape:cora", hidden=16))
    assert estimator.kernels(*group) == known
    assert len(followed) == 1


def test_the_least_recently_used_steps_go(monkeypatch):
    folder, task = home() / STEPS, weft.Task(graph="shape:cora", hidden=16)
    for epochs in (1, 2, 3, 4):
        estimator, *group = group_of(task.with_values(epochs=epochs))
        estimator.steps(group[0][0])
        if epochs == 1:
            size = sum(path.stat().st_size for path in folder.iterdir())
            monkeypatch.setattr(home_module, "MAX_STEP_BYTES", int(2.5 * size))
        for path in folder.glob("*.gz"):
            if path.stat().st_atime > 1e6:  # written within a tick of the clock
                os.utime(path, (epochs, epochs))
    assert sorted(path.stat().st_mtime for path in folder.glob("*.gz"))[-1] == 4.0
    assert 1 <= len(list(folder.glob("*.gz"))) <= 2
