"""Choose sampled training for tasks that leave the mode open and do not fit as a whole; then where their things lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.core.errors import WeftError
from weft.core.plan import Plan, PlanOptions
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.planning.estimator import NONE, Estimator
from weft.engine.planning.placing import place_one, with_places
from weft.planner.grouping.limits import Limits
from weft.planner.training_mode import MODE_IS_SET, may_sample


def with_modes(tasks: Sequence[Task], estimator: Estimator, room: int, options: PlanOptions = NONE) -> list[Task]:
    """``tasks``, with ``mode="sampled"`` where ``mode="auto"`` needs more than ``room`` on the whole graph.

    A task that would not fit sampled either is left as it is, and refused with what it needs as a whole. The estimator
    then knows where things lie; ``options`` say so of sampled tasks, and are refused if there is none.
    """
    found = [_sampled(task) if _to_sample(task, estimator, room, options) else task for task in tasks]
    with_places(found, estimator, room, options)
    return found


def _to_sample(task: Task, estimator: Estimator, room: int, options: PlanOptions) -> bool:
    return may_sample(task) and _needs_sampling(task, estimator, room, options)


def with_reason(plan: Plan, tasks: Mapping[str, Task], room: int) -> Plan:
    """``plan``, which says so if its members are sampled because the whole graph does not fit into ``room`` bytes.

    ``tasks``: as they were given, by name.
    """
    if plan.mode != "sampled" or any(tasks[name].sampled for name in plan.members):
        return plan
    told = f"the whole graph does not fit into {show_bytes(room)}"
    return replace(plan, why=tuple(reason.replace(MODE_IS_SET, told) for reason in plan.why))


def in_mode(task: Task, mode: str) -> Task:
    """``task`` in the mode of the plan that it trains by."""
    return _sampled(task) if mode == "sampled" and not task.sampled else task


def _sampled(task: Task) -> Task:
    return task.with_values(mode="sampled")


def _needs_sampling(task: Task, estimator: Estimator, room: int, options: PlanOptions = NONE) -> bool:
    limits = Limits(estimator.stats(task), estimator.machine.device, estimator.machine, budget=room)
    if limits.surely_fits([task]):  # by several times, so that no dry run is needed to know
        return False
    try:
        if estimator.alone(task).cost.total_bytes <= room:
            return False
        return place_one(_sampled(task), estimator, room, options)
    except WeftError:
        if options.places:  # what is wrong with them
            raise
        return False
