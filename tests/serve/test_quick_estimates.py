"""The bound on a very small task's memory: never below what a dry run finds, on any machine that is known."""

from __future__ import annotations

import pytest

import weft
from weft.engine.estimator import Estimator
from weft.engine.graphs import Graphs
from weft.engine.machine import find_machine, load_calibration
from weft.sched.queue_state import QueuedTask
from weft.serve import estimates
from weft.serve.estimates import estimate_of, quick_estimate
from weft.serve.queue_db import QueueTask
from weft.serve.state import queued_task

BOUND_AND_PREDICTED = (weft.RunOptions(), weft.RunOptions(budget="1GiB"))  # of a task with a budget


@pytest.mark.parametrize("machine", ["h200", "a100-80g", "v100-32g", "cpu"])
@pytest.mark.parametrize(
    "given",
    [
        {"model": "gcn", "hidden": 4},
        {"model": "sage", "hidden": 64, "layers": 3, "norm": "batch"},
        {"model": "gin", "hidden": 16},
        {"model": "gat", "hidden": 8, "heads": 8},
    ],
    ids=lambda given: given["model"],
)
def test_a_bound_is_no_less_than_what_a_dry_run_finds(given, machine):
    task = weft.Task(graph="demo", epochs=20, **given)
    known = find_machine(machine)
    estimator = Estimator(known, load_calibration(known), Graphs([task]))
    quick = quick_estimate(task, estimator)
    assert quick is not None
    found, plan = quick
    assert plan.cost["total_bytes"] == found["bytes"] >= estimator.alone(task).cost.total_bytes


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
def test_the_turn_of_a_kernel_by_rule_of_thumb_is_near_that_of_a_dry_run(model):
    task = weft.Task(graph="demo", model=model, layers=5, hidden=64, epochs=20)
    known = find_machine("h200")
    estimator = Estimator(known, load_calibration(known), Graphs([task]))
    found = quick_estimate(task, estimator)[0]["turn_seconds"]
    assert found == pytest.approx(estimator.alone(task).cost.turn_seconds, rel=0.3)


@pytest.mark.parametrize("options", BOUND_AND_PREDICTED, ids=["bound", "dry run"])
def test_a_policy_sees_the_turn_of_a_planned_task(options, monkeypatch):
    monkeypatch.setattr(estimates, "machine_of", lambda device: find_machine("h200"))
    task = weft.Task(graph="demo", hidden=8, epochs=20)
    plan = estimate_of(task, "cuda:0", options)
    assert 1e-6 < plan["turn_seconds"] < 1e-4
    seen = queued_task(QueueTask("t", 1, "planned", {"task": {}}, plan=plan), 0.1)
    assert seen.turn_seconds == plan["turn_seconds"]
    assert QueuedTask.from_dict(seen.to_dict()) == seen
    before = {key: value for key, value in plan.items() if key != "turn_seconds"}
    assert queued_task(QueueTask("t", 1, "planned", {"task": {}}, plan=before), 0.1).turn_seconds == 0.0


def test_on_a_processor_kernels_do_not_take_turns(monkeypatch):
    monkeypatch.setattr(estimates, "machine_of", lambda device: find_machine("cpu"))
    for options in BOUND_AND_PREDICTED:
        assert estimate_of(weft.Task(graph="demo", epochs=2), "cpu", options)["turn_seconds"] == 0.0
