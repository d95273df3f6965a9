"""What is set aside for a task or a fused group: never below what a dry run of it finds, on any known machine."""

from __future__ import annotations

from functools import cache

import pytest

import weft
from tests.serve.direct_queue import DirectQueue
from weft.engine.estimator import Estimator
from weft.engine.graphs import Graphs
from weft.engine.inference import one_epoch
from weft.engine.machine import find_machine, load_calibration
from weft.planner.grouping.groups import plan_as_one_group, plan_with_first
from weft.sched.device_plan import GroupDraft
from weft.sched.interference import Interference
from weft.sched.queue_state import QueuedTask
from weft.serve import estimates
from weft.serve.estimates import join_key, quick_estimate, shared_bytes
from weft.serve.groups import GROWTH
from weft.serve.options import MIB, ServeOptions
from weft.serve.planner import TaskPlanner
from weft.serve.queue_db import Submission
from weft.serve.state import SupervisorState
from weft.serve.worker_pool import WorkerPool

MACHINES = ["h200", "a100-80g", "v100-32g", "cpu"]
GROUPS = {
    "padded": ({"model": "gcn"}, [8, 8, 256]),
    "norms": ({"model": "sage", "norm": "batch"}, [16, 16]),
    "many": ({"model": "gcn", "dropout": 0.5, "norm": "batch", "residual": True, "layers": 4}, [32] * 8),
}


@cache
def estimator_of(machine):
    known = find_machine(machine)
    return Estimator(known, load_calibration(known), Graphs())


def tasks_of(given, widths):
    return [
        weft.Task(graph="demo", hidden=hidden, epochs=20, seed=place, name=f"t{place}", **given)
        for place, hidden in enumerate(widths)
    ]


def predicted(task, estimator):
    cost = estimator.alone(task).cost
    return cost.total_bytes, shared_bytes(cost, estimator.machine)


def bounded(task, estimator):
    found, _ = quick_estimate(task, estimator)
    return found["bytes"], found["shared_bytes"]


def set_aside(tasks, estimator, estimate):
    """Bytes of a group before the safety margin, as the default policy counts them."""
    draft, common = GroupDraft(1.0, Interference()), estimator.machine.context_bytes
    for task in tasks:
        size, shared = estimate(task, estimator)
        more = {"join_key": "k", "structure": join_key(task), "common_bytes": min(common, shared)}
        draft.add(QueuedTask(task.label, size, 1.0, shared_bytes=shared, **more))
    return draft.footprint(0.0).bytes


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("group", GROUPS)
def test_a_fused_group_has_what_its_dry_run_finds(group, machine):
    given, widths = GROUPS[group]
    tasks, estimator = tasks_of(given, widths), estimator_of(machine)
    assert len({join_key(task) for task in tasks}) == 1
    known = estimator.machine
    plan = plan_as_one_group(tasks, estimator.stats(tasks[0]), known.device, machine=known)
    needed = estimator.together(tasks, plan).cost.total_bytes
    for estimate in (predicted, bounded):
        aside = set_aside(tasks, estimator, estimate)
        assert aside >= needed, f"{estimate.__name__}: {aside / needed:.3f} of it"
        if known.device == "cuda":  # the context is there once
            assert aside < needed + 0.5 * len(tasks) * known.context_bytes


@pytest.mark.parametrize("machine", ["h200", "a100-80g", "v100-32g"])
def test_a_group_of_several_structures_has_what_its_dry_run_finds(machine):
    estimator = estimator_of(machine)
    known = estimator.machine
    models = ["gcn", "gcn", "sage", "gin", "gat"]
    tasks = [weft.Task(graph="demo", model=model, hidden=16, layers=2 + (place == 1), epochs=20, name=f"t{place}")
             for place, model in enumerate(models)]  # fmt: skip
    plan = plan_with_first(tasks, estimator.stats(tasks[0]), known.device, machine=known)
    assert (plan.join, len(plan.stack_members)) == ("concurrent", 5)
    needed = estimator.together(tasks, plan).cost.total_bytes
    for estimate in (predicted, bounded):
        aside = set_aside(tasks, estimator, estimate)
        assert aside >= needed, f"{estimate.__name__}: {aside / needed:.3f} of it"


@pytest.mark.parametrize("machine", MACHINES)
def test_one_epoch_bounds_inference_and_a_retry_grows(machine):
    estimator = estimator_of(machine)
    (task,) = tasks_of({"model": "gin", "layers": 3}, [64])
    cost = estimator.alone(one_epoch(task)).cost
    forward = cost.bytes.get("graph", 0) + cost.bytes.get("input", 0) + cost.bytes.get("weight", 0)
    assert bounded(one_epoch(task), estimator)[0] >= cost.total_bytes > forward > 0
    assert GROWTH * predicted(task, estimator)[0] > predicted(task, estimator)[0]


def test_tasks_of_many_epochs_join_only_those_of_as_many():
    one, two, three = (weft.Task(graph="demo", epochs=epochs) for epochs in (10, 4096, 1_000_000))
    assert join_key(one) == join_key(two) != join_key(three)
    assert join_key(three) == join_key(weft.Task(graph="demo", epochs=1_000_000, lr=0.5))


def test_a_budget_below_what_is_predicted_refuses_inference_as_well(tmp_path):
    options = weft.RunOptions(budget="1GiB")
    plan = estimates.inference_estimate(weft.Task(graph="demo", model="gcn", hidden=64), "cpu", options)
    assert plan["bytes"] > MIB
    state = SupervisorState(ServeOptions(tmp_path / "q.db"))
    with DirectQueue(state.options.db) as state.db:
        (task,) = state.db.submit_many([Submission({"task": {"graph": "demo"}, "budget": MIB})])
        planner = TaskPlanner(state, WorkerPool(state))
        (kept,) = planner._within_limits(task, {**plan, "guess": True})  # nothing is known: its budget is the limit
        assert kept[1]["bytes"] == MIB
        assert planner._within_limits(task, plan) == []
        assert "more than its budget of 1.00 MiB" in state.db.get(task.id).error
