"""Dry runs for tests: of one task, several equal ones or a group, without a planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core.graph_stats import GraphStats
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.runtime import dry_run


def default_plan(group: Sequence[Task], device: str) -> Plan:
    """One stack of all, captured on a GPU, with the first aggregation computed once if it is constant."""
    once = not any(task.input_dropout for task in group)
    return Plan(
        members=tuple(task.label for task in group),
        join="stacked" if len(group) > 1 else "solo",
        device=device,
        replay=device == "cuda",
        first_layer="once" if once else "per_step",
    )


def capture(
    task: Task | Sequence[Task],
    graph: Graph | GraphStats,
    device: str = "cuda",
    *,
    tasks: int = 1,
    plan: Plan | None = None,
    merger: Any = None,
) -> dry_run.Captured:
    """A dry run of ``task``: one, of which ``tasks`` are stacked, or all the members of a group."""
    group = [task] * tasks if isinstance(task, Task) else list(task)
    return dry_run.capture(group, graph, plan or default_plan(group, device), merger)
