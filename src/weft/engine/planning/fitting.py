"""Groups that fit: the same for a plan and for a run, each with what it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.core.plan import Plan
from weft.core.plan_options import PlanOptions
from weft.core.task import Task
from weft.engine.planning.estimator import Estimate, Estimator
from weft.engine.planning.sampled_estimates import group_estimates
from weft.planner.cost.inductor import whether_to_compile
from weft.planner.grouping.groups import group
from weft.planner.grouping.stack_size_table import Throughput

NONE = PlanOptions()
ATTEMPTS = 4  # at groups that fit
LESS = 0.99  # of the room that would be right, were memory proportional to the members


def groups_within_budget(
    tasks: Sequence[Task], estimator: Estimator, room: int, throughput: Throughput, plan_options: PlanOptions = NONE
) -> list[tuple[Plan, Estimate]]:
    """Groups within ``room`` bytes and what they take, which is also their ``cost``.

    They are made smaller where a captured group takes more than grouping had reckoned with; a task that does not fit
    alone is a group all the same.
    """
    budget, by_name = room, {task.label: task for task in tasks}
    for _ in range(ATTEMPTS):
        plans = grouped(tasks, estimator, budget, throughput, plan_options.weave)
        found = list(zip(plans, group_estimates(plans, by_name, estimator, room), strict=True))
        over = [one.cost.total_bytes for plan, one in found if one.cost.total_bytes > room and len(plan.members) > 1]
        if not over:
            break
        budget = int(budget * room / max(over) * LESS)
    return [(_decided(plan, estimate, by_name, estimator, plan_options), estimate) for plan, estimate in found]


def _decided(
    plan: Plan, estimate: Estimate, tasks: Mapping[str, Task], estimator: Estimator, plan_options: PlanOptions
) -> Plan:
    """The plan with its cost, and with what that says of compiling it."""
    epochs = max(tasks[name].epochs for name in plan.members)
    found = estimator.compiling(estimate, tasks[plan.members[0]], plan)
    compiled, why = whether_to_compile(plan_options.compile, found, epochs, plan.device, plan.join)
    decisions = {"compiled": compiled, "why": (*plan.why, *why)}
    return replace(plan, cost=estimate.cost.to_dict(), weights=estimate.weights, **decisions)


def grouped(
    tasks: Sequence[Task], estimator: Estimator, budget: int, throughput: Throughput, weave: bool | None = None
) -> list[Plan]:
    """Groups by what the estimator says of their memory."""
    machine = estimator.machine
    return group(
        tasks,
        estimator.stats,
        machine.device,
        machine=machine,
        memory_of=estimator.group_bytes,
        throughput=throughput,
        budget=budget,
        weave=weave,
    )
