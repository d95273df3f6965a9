"""The plan of one group as it travels from a scheduler to a worker, and back into a report that can be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.core.cost import Cost
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.report.plan_report import GroupEstimate, PlanReport


def group_plan(tasks: Sequence[Task], stats: GraphStats, alone: Plan, total_bytes: int, machine: Machine) -> Plan:
    """The plan of ``tasks`` as one group, executable elsewhere; ``alone`` is the plan of one of them by itself.

    Of a group of several the cost is not predicted beyond ``total_bytes``, which admission has set aside for it.
    """
    if len(tasks) == 1:
        return replace(alone, members=(tasks[0].label,), tasks=tuple(tasks), graph=stats.fingerprint())
    made = plan_as_one_group(tasks, stats, alone.device, machine=machine, weave=False)
    cost = {"total_bytes": total_bytes}
    return replace(made, tasks=tuple(tasks), graph=stats.fingerprint(), cost=cost, mode=alone.mode, stages=alone.stages)


def report_to_run(data: Mapping[str, Any], machine: Machine) -> PlanReport:
    """The report that ``weft.run`` carries out, from the plan of one group as plain data."""
    plan = Plan.from_dict(data)
    work: Task | Sweep = plan.tasks[0] if len(plan.tasks) == 1 else Sweep.from_tasks(plan.tasks)
    epochs = max(task.epochs for task in plan.tasks)
    group = GroupEstimate(plan, Cost.from_dict(plan.cost), epochs, fits=True)
    return PlanReport(work.label, machine, machine.memory_bytes, (), (group,), work=work)
