"""Explain a planned report: the ways of training each group that were not taken, and simulated schedules."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.division import PhaseTimes, built_in
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.engine.base.machines import load_calibration
from weft.engine.planning.choosing import Chosen, choose_group, words
from weft.engine.planning.estimator import Estimator
from weft.planner.division.choose import Setup, choose
from weft.planner.division.simulator import Simulation, simulate
from weft.planner.report.plan_report import GroupEstimate, PlanReport
from weft.planner.training_mode import steps_per_epoch

MOST_GROUPS = 6  # that are explained


def explained(report: PlanReport) -> dict[str, Chosen]:
    """How each of the first groups would train fastest, by its name, with the runners-up."""
    estimator = Estimator(report.machine, load_calibration(report.machine))
    return {
        name: choose_group(tasks, None, estimator, report.budget)
        for name, _, tasks in list(_named(report))[:MOST_GROUPS]
    }


def explanation(report: PlanReport) -> str:
    """The runners-up of every group as text."""
    lines = []
    for name, chosen in explained(report).items():
        best = chosen.choice.best
        lines += ["", f"{name}, one task of it: ways to train, the fastest first (searched in {chosen.seconds:.2f} s)"]
        lines += [f"  > {words(best)}", *(f"    {words(one)}" for one in chosen.choice.runners_up)]
    return "\n".join(lines)


def schedules(report: PlanReport) -> dict[str, Simulation]:
    """The simulated epoch of every group whose batches two sides can prepare; a SpecError if there is none."""
    estimator = Estimator(report.machine, load_calibration(report.machine))
    found = {}
    for name, group, tasks in _named(report):
        simulation = _simulated(group, tasks, estimator, report)
        if simulation is not None:
            found[f"{name}: {simulation.division.words()}"] = simulation
    if not found:
        raise SpecError(
            "--simulate: no group has batches that a host and a GPU prepare together; that needs mode='sampled', a "
            "machine with a GPU, and features or edges in host memory"
        )
    return found


def _simulated(
    group: GroupEstimate, tasks: Sequence[Task], estimator: Estimator, report: PlanReport
) -> Simulation | None:
    plan, stats = group.plan, estimator.stats(tasks[0])
    if plan.mode != "sampled" or plan.device != "cuda" or not plan.places.read_by_gpu or plan.places.on_device:
        return None
    task = tasks[0] if tasks[0].sampled else tasks[0].with_values(mode="sampled")
    if plan.division is not None and plan.phases:
        times = PhaseTimes.from_dict(plan.phases)
        return simulate(plan.division, times, steps_per_epoch(task, stats), built_in(plan.division.beside))
    setup = Setup(task, plan.places, group.cost, group.cost.total_bytes, len(plan.members))
    choice = choose([setup], stats, report.machine, report.budget)
    ways = [one.simulation for one in (choice.best, *choice.runners_up) if one.simulation is not None]
    return ways[0] if ways else None


def _named(report: PlanReport) -> list[tuple[str, GroupEstimate, list[Task]]]:
    tasks = {task.label: task for task in report.work_tasks}
    return [
        (f"group {number}", group, [tasks[name] for name in group.plan.members])
        for number, group in enumerate(report.groups, 1)
    ]
