"""Explain a planned report: the ways of training each group that were not taken, and simulated schedules."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.core.division import Division, built_in
from weft.core.errors import SpecError
from weft.core.plan import Plan
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.base.machines import load_calibration
from weft.engine.planning.choosing import choose_group, words
from weft.engine.planning.estimator import Estimator
from weft.engine.planning.placing import with_places
from weft.engine.planning.training_modes import in_mode
from weft.planner.division.candidate import Candidate
from weft.planner.division.choose import BUCKETS_GAIN, RUNNERS_UP
from weft.planner.division.predicted_times import predicted_times
from weft.planner.division.setup import Setup, batch_bytes
from weft.planner.division.simulator import Simulation, simulate
from weft.planner.report.plan_report import GroupEstimate, PlanReport
from weft.planner.training_mode import steps_per_epoch

MOST_GROUPS = 6  # that are explained


@dataclass(frozen=True)
class Explained:
    """A group: the way that its plan takes, others by their seconds, and how long looking for those took."""

    taken: Candidate
    others: tuple[Candidate, ...]
    seconds: float


def explained(report: PlanReport) -> dict[str, Explained]:
    """Each of the first groups by its name, searched again under the options that it was planned with."""
    return {one.name: _explained(one, report.budget) for one in _searched(report)}


def explanation(report: PlanReport) -> str:
    """The ways of every group as text, the one that was planned marked."""
    return "\n".join(line for name, one in explained(report).items() for line in told(name, one, report.budget))


def told(name: str, one: Explained, budget: int) -> list[str]:
    """The ways of one group in lines."""
    lines = ["", f"{name}, one task of it: ways to train, the fastest first (searched in {one.seconds:.2f} s)"]
    for way in sorted((one.taken, *one.others), key=lambda way: way.seconds_per_task):
        mark = ">" if way is one.taken else " "
        lines.append(f"  {mark} {words(way)}{_obstacle(way, one.taken, budget)}")
    return lines


def schedules(report: PlanReport) -> dict[str, Simulation]:
    """The simulated epoch of every group whose batches are divided; a SpecError if there is none."""
    found = {}
    for one in _searched(report, divided=True):
        simulation = one.taken().simulation
        if simulation is not None:
            found[f"{one.name}: {simulation.division.words()}"] = simulation
    if not found:
        raise SpecError(
            "--simulate: no group has batches that a host and a GPU prepare together; that needs mode='sampled', a "
            "machine with a GPU, features or edges in host memory, and room for batches on the GPU"
        )
    return found


@dataclass(frozen=True)
class _Searched:
    """A group, its tasks in the mode of its plan, and all ways to train them."""

    name: str
    group: GroupEstimate
    tasks: Sequence[Task]
    estimator: Estimator
    ways: Sequence[Candidate]
    seconds: float

    def taken(self) -> Candidate:
        """The plan as a candidate, with the seconds and bytes that were printed."""
        plan, cost = self.group.plan, self.group.cost
        known = next((one for one in self.ways if _same(one, plan)), None)
        if known is not None:
            sure = replace(known.setup, rough=False)
            return replace(known, setup=sure, seconds=cost.epoch_seconds, device_bytes=cost.total_bytes)
        setup = Setup(self.tasks[0], plan.places, cost, cost.total_bytes, len(plan.members))
        found = Candidate(setup, cost.epoch_seconds, cost.total_bytes)
        return found if plan.division is None else _divided(found, plan.division, self.estimator)


def _searched(report: PlanReport, divided: bool = False) -> Iterator[_Searched]:
    """The first groups; ``divided``: those alone whose batches are."""
    groups = report.groups[:MOST_GROUPS]
    if divided and all(group.plan.division is None for group in groups):
        return
    estimator = Estimator(report.machine, load_calibration(report.machine))
    modes = {name: plan.mode for plan in report.plans for name in plan.members}
    tasks = {task.label: in_mode(task, modes[task.label]) for task in report.work_tasks}
    with_places(list(tasks.values()), estimator, report.budget, report.options)
    for number, group in enumerate(groups, 1):
        if divided and group.plan.division is None:
            continue
        own, undivided = [tasks[name] for name in group.plan.members], replace(group.plan, division=None)
        begin = time.perf_counter()
        # However long it takes: the same is said of a plan whenever it is asked for. Schedules need no other settings.
        about = (own, undivided, estimator, report.budget, report.options)
        chosen = choose_group(*about, begin=-math.inf if divided else math.inf)
        yield _Searched(f"group {number}", group, own, estimator, chosen.choice.ways, time.perf_counter() - begin)


def _explained(one: _Searched, budget: int) -> Explained:
    others = [way for way in one.ways if not _same(way, one.group.plan)]
    ranked = sorted((_with_condition(way, one.tasks[0]) for way in others), key=lambda way: way.seconds_per_task)
    # At least half of them could be taken: ways that do not fit or need a setting may be many.
    free = [way for way in ranked if way.device_bytes <= budget and not way.setup.condition]
    shown = free[: RUNNERS_UP // 2]
    shown += [way for way in ranked if way not in shown][: RUNNERS_UP - len(shown)]
    return Explained(one.taken(), tuple(sorted(shown, key=lambda way: way.seconds_per_task)), one.seconds)


def _divided(one: Candidate, division: Division, estimator: Estimator) -> Candidate:
    """``one`` with a ``division`` that no search came upon."""
    setup, stats = one.setup, estimator.stats(one.setup.task)
    steps = steps_per_epoch(setup.task, stats)
    times = predicted_times(setup.task, stats, estimator.machine, setup.placement, setup.training, steps)
    simulation = simulate(division, times, steps, built_in(setup.captured))
    host = division.pinned_batches * batch_bytes(setup.task, stats)
    return replace(one, division=division, host_bytes=host, simulation=simulation, times=times)


def _same(one: Candidate, plan: Plan) -> bool:
    """Whether a candidate is what ``plan`` says."""
    setup = one.setup
    if setup.condition or setup.members != len(plan.members) or setup.task.sampled != (plan.mode == "sampled"):
        return False
    return not setup.task.sampled or (setup.placement, one.division) == (plan.places, plan.division)


def _with_condition(one: Candidate, task: Task) -> Candidate:
    """Batches of a task that trains on the whole graph have to be asked for."""
    if one.setup.condition or one.setup.task.sampled == task.sampled:
        return one
    return replace(one, setup=replace(one.setup, condition="mode='sampled'"))


def _obstacle(one: Candidate, taken: Candidate, budget: int) -> str:
    """Why a way is not taken that seems to be faster, or whatever its seconds because it does not fit."""
    if one.device_bytes > budget:
        return f" - does not fit into {show_bytes(budget)}"
    if one is taken or one.setup.condition or one.seconds_per_task >= taken.seconds_per_task:
        return ""
    if taken.setup.task.sampled and taken.setup.placement.on_device:
        return " - nothing is moved off the GPU where all of it fits"
    if one.setup.padding is not None:
        return f" - several sizes of batches have to save {BUCKETS_GAIN:.0%}"
    return " - rough, no dry run was made of it" if one.setup.rough else ""
