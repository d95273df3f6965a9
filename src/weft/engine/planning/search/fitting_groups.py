"""Find groups of tasks that fit into a budget, by what an estimator says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.core.cost import SIZES, Cost
from weft.core.placement import Placement
from weft.core.plan import Plan, PlanOptions
from weft.core.task import Task
from weft.engine.planning.estimator import NONE, Estimate, Estimator
from weft.engine.planning.sampled_estimates import group_estimates
from weft.planner.cost.inductor import whether_to_compile
from weft.planner.grouping.groups import group
from weft.planner.grouping.stack_size_table import Throughput
from weft.planner.sampling.places import reasons, with_cache
from weft.planner.sampling.transfers import with_batches

ATTEMPTS = 4  # at groups that fit
LESS = 0.99  # of the budget that would be right if memory were proportional to the members


def groups_within_budget(
    tasks: Sequence[Task], estimator: Estimator, room: int, throughput: Throughput, plan_options: PlanOptions = NONE
) -> list[tuple[Plan, Estimate]]:
    """Groups within ``room`` bytes and what they take, which is also their ``cost``.

    They are made smaller if the dry run of a group takes more than grouping had predicted; a task that does not fit
    alone is a group all the same.
    """
    left, by_name = room - (plan_options.cache or 0), {task.label: task for task in tasks}
    budget = left
    for _ in range(ATTEMPTS):
        plans = grouped(tasks, estimator, budget, throughput, plan_options.weave)
        found = list(zip(plans, group_estimates(plans, by_name, estimator, left), strict=True))
        over = [one.cost.total_bytes for plan, one in found if one.cost.total_bytes > left and len(plan.members) > 1]
        if not over:
            break
        budget = int(budget * left / max(over) * LESS)
    cached = [cached_group(plan, estimate, by_name, estimator, room, plan_options) for plan, estimate in found]
    return [(_decided(plan, estimate, by_name, estimator, plan_options), estimate) for plan, estimate in cached]


def cached_group(
    plan: Plan, estimate: Estimate, tasks: Mapping[str, Task], estimator: Estimator, room: int, options: PlanOptions
) -> tuple[Plan, Estimate]:
    """A sampled group with its cache, in what is left of ``room``, and the reasons for where its things lie."""
    task, machine = tasks[plan.members[0]], estimator.machine
    if not task.sampled:
        return plan, estimate
    stats, before = estimator.stats(task), plan.places
    left = room - estimate.cost.total_bytes
    placement = with_cache(before, task, stats, options, left)
    if placement != before:
        estimate = replace(estimate, cost=_with_placement(estimate, task, placement, estimator))
    plan = replace(plan, placement=placement, why=(*plan.why, *reasons(placement, task, stats, machine)))
    return plan, estimate


def _with_placement(estimate: Estimate, task: Task, placement: Placement, estimator: Estimator) -> Cost:
    """The cost with the bytes and the gain of a cache, of which the dry run knew nothing."""
    cost, stats = estimate.cost, estimator.stats(task)
    if estimate.trained is not None:
        times = {name: getattr(estimate.trained, name) for name in ("seconds", "families", "phases", "uncorrected")}
        cost = with_batches(replace(cost, **times), task, stats, placement, estimator.machine)
    taken = placement.cache_bytes
    sizes = {name: getattr(cost, name) + taken for name in SIZES}
    return replace(cost, **sizes, bytes={**cost.bytes, "cache": taken} if taken else cost.bytes)


def _decided(
    plan: Plan, estimate: Estimate, tasks: Mapping[str, Task], estimator: Estimator, plan_options: PlanOptions
) -> Plan:
    """The plan with its cost, and with what that says of compiling it."""
    epochs = max(tasks[name].epochs for name in plan.members)
    found = estimator.compiling(estimate, tasks[plan.members[0]], plan)
    compiled, why = whether_to_compile(plan_options.compile, found, epochs, plan.device, plan.join)
    if plan.mode == "sampled":
        compiled, why = (
            False,
            ("not compiled: Inductor is for steps on the whole graph",) if plan_options.compile else (),
        )
    decisions = {"compiled": compiled, "why": (*plan.why, *estimate.notes, *why)}
    return replace(plan, cost=estimate.cost.to_dict(), weights=estimate.weights, **decisions)


def grouped(
    tasks: Sequence[Task], estimator: Estimator, budget: int, throughput: Throughput, weave: bool | None = None
) -> list[Plan]:
    """Groups by what the estimator says of their memory."""
    machine, by_name = estimator.machine, {task.label: task for task in tasks}

    def bytes_of(some: Sequence[Task]) -> float:
        return 0.0 if estimator.surely_fit(some, budget) else estimator.group_bytes(some)

    plans = group(
        tasks,
        estimator.stats,
        machine.device,
        machine=machine,
        memory_of=bytes_of,
        throughput=throughput,
        budget=budget,
        weave=weave,
    )
    return [estimator.placed(plan, by_name[plan.members[0]]) for plan in plans]
