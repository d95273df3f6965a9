"""Explain a planned report: the ways of training each group that were not taken, and simulated schedules."""

from __future__ import annotations

from weft.core.errors import SpecError
from weft.core.task import Task
from weft.engine.base.machines import load_calibration
from weft.engine.planning.choosing import Chosen, choose_group, words
from weft.engine.planning.estimator import Estimator
from weft.planner.division.simulator import Simulation
from weft.planner.report.plan_report import GroupEstimate, PlanReport

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
    found = {}
    for name, chosen in explained(report).items():
        drawn = chosen.choice.best if chosen.choice.best.simulation is not None else chosen.choice.simulated
        simulation = None if drawn is None else drawn.simulation
        if simulation is not None:
            found[f"{name}: {simulation.division.words()}"] = simulation
    if not found:
        raise SpecError(
            "--simulate: no group has batches that a host and a GPU prepare together; that needs mode='sampled', a "
            "machine with a GPU, and features or edges in host memory"
        )
    return found


def _named(report: PlanReport) -> list[tuple[str, GroupEstimate, list[Task]]]:
    tasks = {task.label: task for task in report.work_tasks}
    return [
        (f"group {number}", group, [tasks[name] for name in group.plan.members])
        for number, group in enumerate(report.groups, 1)
    ]
