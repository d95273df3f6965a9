"""Choose sampled training for tasks that leave the mode open and whose graph does not fit as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.errors import WeftError
from weft.core.task import Task
from weft.engine.planning.estimator import Estimator
from weft.planner.grouping.limits import Limits
from weft.planner.training_mode import may_sample


def with_modes(tasks: Sequence[Task], estimator: Estimator, room: int) -> list[Task]:
    """``tasks``, with ``mode="sampled"`` where ``mode="auto"`` needs more than ``room`` on the whole graph.

    A task that would not fit sampled either is left as it is, and refused with what it needs as a whole.
    """
    return [_sampled(task) if may_sample(task) and _needs_sampling(task, estimator, room) else task for task in tasks]


def in_mode(task: Task, mode: str) -> Task:
    """``task`` in the mode of the plan that it trains by."""
    return _sampled(task) if mode == "sampled" and not task.sampled else task


def _sampled(task: Task) -> Task:
    return task.with_values(mode="sampled")


def _needs_sampling(task: Task, estimator: Estimator, room: int) -> bool:
    limits = Limits(estimator.stats(task), estimator.machine.device, estimator.machine, budget=room)
    if limits.surely_fits([task]):  # by several times, so that no dry run is needed to know
        return False
    try:
        whole = estimator.alone(task).cost.total_bytes
        return whole > room and estimator.alone(_sampled(task)).cost.total_bytes <= room
    except WeftError:
        return False
