"""Decide whether a run is so small that a dry run would cost more than it can save."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.compatibility import graph_key
from weft.core.task import Task
from weft.engine.planning.estimator import Estimator
from weft.planner.cost.rule_of_thumb import rates_of, work
from weft.planner.grouping.limits import Limits

SMALL_SECONDS = 30.0  # of training: a dry run of a group takes 0.1 to 0.3


def is_small(tasks: Sequence[Task], estimator: Estimator, room: int) -> bool:
    """Whether ``tasks`` surely fit into ``room`` bytes, all of them at once, and train for seconds by rule of thumb."""
    if any(task.traits is None or task.sampled for task in tasks):
        return False
    by_graph: dict[object, list[Task]] = {}
    for task in tasks:
        by_graph.setdefault(graph_key(task), []).append(task)
    return _seconds(tasks, estimator) < SMALL_SECONDS and all(
        _surely_fit(alike, estimator, room) for alike in by_graph.values()
    )


def _surely_fit(tasks: Sequence[Task], estimator: Estimator, room: int) -> bool:
    machine = estimator.machine
    return Limits(estimator.stats(tasks[0]), machine.device, machine, budget=room).surely_fits(tasks)


def _seconds(tasks: Sequence[Task], estimator: Estimator) -> float:
    """What the tasks would take one after another, without what launches cost: a stack shares those."""
    machine = estimator.machine
    return sum(
        task.epochs * work(task, estimator.stats(task)).seconds(rates_of(machine.device, machine, task.precision))
        for task in tasks
    )
