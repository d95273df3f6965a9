"""Shares: the groups of a plan, divided over the nodes of a cluster.

Tasks on one graph are joined per node: a group is cut into as many shares as its part of the work is worth nodes, so
that every node trains one share, and members of a share still train together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.task import Task
from weft.planner.report.plan_report import GroupEstimate, PlanReport


@dataclass(frozen=True)
class Share:
    """Tasks that one node trains. ``key`` names it; ``num_bytes``: what its device must have, at most."""

    key: str
    tasks: tuple[Task, ...]
    num_bytes: int


def shares_of(report: PlanReport, nodes: int) -> list[Share]:
    """The groups of ``report``, which has its tasks, over ``nodes``."""
    counts = _counts([group.cost.epoch_seconds * _epochs(group) for group in report.groups], nodes)
    found = []
    for number, (group, count) in enumerate(zip(report.groups, counts, strict=True), 1):
        parts = divide(group.plan.tasks, count)
        keys = [str(number)] if len(parts) == 1 else [f"{number}.{place}" for place in range(1, len(parts) + 1)]
        found += [Share(key, part, group.cost.total_bytes) for key, part in zip(keys, parts, strict=True)]
    return found


def _epochs(group: GroupEstimate) -> int:
    return max(task.epochs for task in group.plan.tasks)


def _counts(seconds: Sequence[float], nodes: int) -> list[int]:
    """How many nodes every group is worth, at least one."""
    total = sum(seconds) or 1.0
    return [max(1, round(nodes * one / total)) for one in seconds]


def divide(tasks: Sequence[Task], count: int) -> list[tuple[Task, ...]]:
    """``tasks`` in at most ``count`` parts of about equal size, in order."""
    count = max(1, min(count, len(tasks)))
    cuts = [len(tasks) * place // count for place in range(count + 1)]
    return [tuple(tasks[first:last]) for first, last in itertools.pairwise(cuts)]
