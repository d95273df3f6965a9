"""The plan of a group on its way to a worker: executable as plain data, with the numbers of a run."""

from __future__ import annotations

import json

import weft
from weft.core.event import finite
from weft.core.plan import Plan
from weft.engine.graphs import Graphs
from weft.engine.machine import find_machine
from weft.planner.report.plan_report import group_plan, report_to_run

HOW = {"device": "cpu", "progress": False}


def planned(tasks, total_bytes=1 << 30, **options):
    stats, machine = Graphs().stats(tasks[0]), find_machine("cpu")
    alone = weft.plan(tasks[0], machine=machine).plans[0]
    made = group_plan(tasks, stats, alone, total_bytes, machine, weft.RunOptions(**options))
    sent = json.loads(json.dumps(finite(made.to_dict()), allow_nan=False))
    return made, report_to_run(sent, machine)


def test_a_task_alone_keeps_its_plan():
    task = weft.Task(graph="demo", model="gcn", hidden=8, epochs=3, name="one")
    made, report = planned([task])
    assert (made.members, made.join, made.tasks) == (("one",), "solo", (task,))
    assert weft.run(report, **HOW).history == weft.run(task, **HOW).history


def test_tasks_of_one_kind_are_one_stack():
    tasks = [weft.Task(graph="demo", model="gcn", hidden=8, epochs=3, seed=s, name=f"s{s}") for s in range(3)]
    made, report = planned(tasks)
    assert (made.join, made.cost["total_bytes"]) == ("stacked", 1 << 30)
    found, expected = weft.run(report, **HOW), weft.run(tasks, **HOW)
    assert [one.history for one in found] == [one.history for one in expected]


def test_different_tasks_on_a_graph_share_a_group_as_in_a_run():
    tasks = [weft.Task(graph="demo", model=m, hidden=8, epochs=2, name=m) for m in ("gcn", "sage")]
    assert planned(tasks)[0].members == ("gcn",)  # on a CPU one operator runs at a time
    made, report = planned(tasks, weave="merged")
    assert (made.join, made.members) == ("woven", ("gcn", "sage"))
    assert Plan.from_dict(made.to_dict()).stacks == made.stacks
    assert {one.status for one in weft.run(report, **HOW)} == {"finished"}


def test_different_tasks_on_a_gpu_train_concurrently():
    tasks = [weft.Task(graph="demo", model=m, hidden=8, epochs=2, name=m) for m in ("gcn", "sage")]
    stats, machine = Graphs().stats(tasks[0]), find_machine("h200")
    alone = weft.plan(tasks[0], machine=machine).plans[0]
    made = group_plan(tasks, stats, alone, 1 << 30, machine)
    assert (made.join, made.stack_members) == ("concurrent", ((0,), (1,)))
    assert made.stack_members == weft.plan(tasks, machine=machine).plans[0].stack_members
