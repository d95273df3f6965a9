"""Check whether a saved plan can be run here as it is, and say why not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.core.errors import DoesNotFitError, SpecError
from weft.core.plan import Plan
from weft.core.units import show_bytes
from weft.engine.base.device import choose_device
from weft.engine.base.graph_cache import Graphs
from weft.engine.planning.run_planner import RunPlanner
from weft.planner.report.plan_report import PlanReport
from weft.planner.report.plan_text import refusal


def check_runnable(report: PlanReport) -> None:
    """Refuse a report that cannot be run anywhere."""
    if report.work is None:
        raise SpecError(f"plan {report.name!r} has no tasks in it; weft.plan(...) makes one that can be run")
    if not report.fits:
        raise DoesNotFitError(refusal(report))
    for plan in report.plans:
        if plan.shards != 1:
            raise SpecError(
                f"plan {report.name!r}: {plan.shards} shards are more than this run has devices for; plan again"
            )


def device_of(report: PlanReport, wanted: str | torch.device) -> torch.device:
    """The device to run on: the kind that was planned for, or a refusal where that is not there or not wanted."""
    kind = report.plans[0].device
    found = choose_device(wanted)
    if str(wanted) == "auto" and kind == "cpu":
        return torch.device("cpu")
    if found.type != kind:
        where = "there is none here" if str(wanted) == "auto" else f"device={str(wanted)!r} is another kind"
        raise SpecError(
            f"plan {report.name!r} is for a {kind} device ({report.machine.name}), but {where}; "
            "plan again with the machine to run on"
        )
    return found


def check_here(plans: Sequence[Plan], graphs: Graphs, planner: RunPlanner) -> None:
    """Refuse plans of another graph, of other weights, or of groups that do not fit into what is free here."""
    for plan in plans:
        task = plan.tasks[0]
        obstacle = None if plan.graph is None else plan.graph.obstacle(graphs.stats(task).fingerprint())
        if obstacle is not None:
            raise SpecError(f"task {task.label!r}: {obstacle}")
    room = planner.room
    for place, plan in enumerate(plans, 1):
        need = plan.cost.get("total_bytes", 0)
        if need > room:
            raise DoesNotFitError(
                f"group {place} of the plan ({_named(plan)}) needs {show_bytes(need)} ({need:,} bytes), but only "
                f"{show_bytes(room)} may be taken on this device; free some memory or raise the budget, or plan again "
                f"for {show_bytes(room)}"
            )
    for plan in plans:
        _check_own_models(plan, planner)


def _check_own_models(plan: Plan, planner: RunPlanner) -> None:
    """A user's module may have changed since; built-in models have the shapes that their settings say."""
    for stack, planned in zip(plan.stack_members, plan.weights, strict=False):
        task = plan.tasks[stack[0]]
        if task.traits is None:
            now = planner.weights(task)
            if now and now[0] != planned:
                raise SpecError(other_weights(task.label, task.model_name))


def other_weights(task: str, model: str) -> str:
    """What to say where the parameters are not those that were planned."""
    return f"task {task!r}: model {model} has other weights, by name or shape, than when this was planned; plan again"


def check_same_groups(saved: Sequence[Plan], plans: Sequence[Plan], where: str) -> None:
    """Refuse to resume a run whose groups are not the plan's; a group that had to be halved is still the plan's."""
    for one in saved:
        if not any(set(one.members) <= set(plan.members) for plan in plans):
            raise SpecError(
                f"{where}: was trained in other groups than this plan has ({_named(one)}); "
                "resume with the spec instead of the plan, or choose another --out"
            )


def _named(plan: Plan) -> str:
    others = len(plan.members) - 1
    return repr(plan.members[0]) + (f" and {others} more" if others else "")
