"""Choose how a group trains: every setup that the estimator can price, through the planner's search."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core.cost import SIZES, Cost
from weft.core.division import PhaseTimes
from weft.core.placement import Placement
from weft.core.plan import Plan, PlanOptions
from weft.core.task import Task
from weft.core.units import parse_bytes
from weft.engine.base.machines import Given, find_machine, load_calibration
from weft.engine.planning.estimator import NONE, Estimate, Estimator
from weft.engine.planning.phase_keys import phases_key
from weft.engine.planning.search.setups import Setups
from weft.planner.division.candidate import Candidate
from weft.planner.division.choose import Choice, Search, choose, worth
from weft.planner.division.setup import Setup, without_cache
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.sampling.places import reasons

NEARLY = 1.25  # times the seconds of one side alone: rates are rough, and a profile decides
CONTENDERS = 3  # setups that get a dry run of their own because they seem to be the fastest


@dataclass(frozen=True)
class Chosen:
    """An executable plan with its predicted cost, the ways that were not taken, and how long choosing took."""

    plan: Plan
    choice: Choice
    seconds: float

    @property
    def cost(self) -> Cost:
        """Predicted for the plan."""
        return Cost.from_dict(self.plan.cost)


def choose_for(work: Task | Sequence[Task], machine: Given = None, budget: str | float | None = None) -> Chosen:
    """How a task, or tasks that differ in numbers alone, train fastest on ``machine`` within ``budget`` bytes.

    Of several tasks the plan is that of the first stack: so many of them share every step.
    """
    there, tasks = find_machine(machine), [work] if isinstance(work, Task) else list(work)
    estimator = Estimator(there, load_calibration(there))
    room = there.memory_bytes if budget is None else parse_bytes(budget)
    begin = time.perf_counter()
    return choose_group(tasks, None, estimator, room, begin=begin)


def choose_group(
    tasks: Sequence[Task],
    plan: Plan | None,
    estimator: Estimator,
    room: int,
    options: PlanOptions = NONE,
    begin: float | None = None,
) -> Chosen:
    """How the group of ``tasks`` trains fastest; ``plan``: as it was grouped (None: in stacks of any size)."""
    begin = time.perf_counter() if begin is None else begin
    search = Setups(tasks, estimator, room, options, begin)
    setups = search.found(plan)
    stats = estimator.stats(tasks[0])
    known = estimator.calibration.phases if estimator.calibration is not None else {}
    digest = stats.fingerprint().digest

    def measured(setup: Setup) -> PhaseTimes | None:
        same = setup.captured and not setup.condition
        about = ([setup.task] * setup.members, setup.placement, digest)
        return known.get(phases_key(*about, buckets=setup.buckets)) if same else None

    # The whole graph has exact gradients: taken if it fits and nothing says otherwise.
    whole = tasks[0].mode != "sampled"
    known_ways = Search(stats, estimator.machine, room, measured)
    about = (stats, estimator.machine, room, measured, lambda one: whole and not one.setup.task.sampled, known_ways)
    choice = choose(setups, *about)
    for _ in range(CONTENDERS):
        if choice.contender is None:
            break
        setups = search.exact(setups, choice.contender.setup, plan)
        choice = choose(setups, *about)
    return Chosen(_executable(choice, plan, tasks, estimator), choice, time.perf_counter() - begin)


def _executable(choice: Choice, plan: Plan | None, tasks: Sequence[Task], estimator: Estimator) -> Plan:
    """The plan of the best candidate with its cost, as a run takes it."""
    best = choice.best
    base = plan or _planned(best.setup, tasks, estimator)
    phases = best.times.to_dict() if best.measured and best.times is not None else {}
    placed = {"placement": best.setup.placement} if best.setup.task.sampled else {}
    mode = "sampled" if best.setup.task.sampled else "full"
    why = (*base.why, *choice.why)
    cost = _cost(best, estimator.machine.device).to_dict()
    return replace(base, mode=mode, division=best.division, phases=phases, cost=cost, why=why, **placed)


def _planned(setup: Setup, tasks: Sequence[Task], estimator: Estimator) -> Plan:
    """The plan of as many tasks as share a step, in the mode of the setup."""
    if setup.members == 1:
        return estimator.plan(setup.task)
    changed = {name: getattr(setup.task, name) for name in ("mode", "precision")}
    members = [task.with_values(**changed) for task in tasks[: setup.members]]
    return plan_as_one_group(members, estimator.stats(members[0]), estimator.machine.device)


def _cost(best: Candidate, device: str) -> Cost:
    """What the best candidate is predicted to take."""
    training, more = best.setup.training, best.device_bytes - best.setup.training.total_bytes
    sizes = {name: getattr(training, name) + more for name in SIZES}
    beside = best.seconds - training.epoch_seconds
    seconds = dict(training.seconds)
    if beside > 0:
        near = "gpu" if best.setup.placement.on_device else "pcie"
        other = near if device == "cuda" else "cpu"
        seconds[other] = seconds.get(other, 0.0) + beside
    cache = best.setup.placement.cache_bytes
    return replace(training, **sizes, seconds=seconds, bytes={**training.bytes, **({"cache": cache} if cache else {})})


def with_divisions(
    found: Sequence[tuple[Plan, Estimate]],
    tasks: Mapping[str, Task],
    estimator: Estimator,
    room: int,
    options: PlanOptions = NONE,
) -> list[tuple[Plan, Estimate]]:
    """Planned groups, those whose batches the host could help to prepare with a division and room for its buffers.

    Who prepares how many is decided by measured phases when the group begins, so a division that is predicted to be a
    little slower is planned as well.
    """
    return [_with_division(plan, estimate, tasks, estimator, room, options) for plan, estimate in found]


def _with_division(
    plan: Plan, estimate: Estimate, tasks: Mapping[str, Task], estimator: Estimator, room: int, options: PlanOptions
) -> tuple[Plan, Estimate]:
    place = plan.places
    one_stack = len(plan.stack_members) == 1 and estimate.trained is not None
    if plan.device != "cuda" or plan.mode != "sampled" or place.on_device or not place.read_by_gpu or not one_stack:
        return plan, estimate
    own = [tasks[name] for name in plan.members]
    ways = choose_group(own, plan, estimator, room, options, begin=-math.inf).choice.ways
    fitting = [one for one in ways if one.device_bytes <= room and not one.setup.condition and not one.setup.rough]
    best = _faster(fitting, plan, estimate)
    return (plan, estimate) if best is None else _moved(best, fitting, plan, own, estimator)


def _faster(fitting: Sequence[Candidate], plan: Plan, estimate: Estimate) -> Candidate | None:
    """The division to plan, or where things lie if one side prepares batches faster there; None: as it was planned."""
    alone = min((one for one in fitting if one.division is None), key=lambda one: one.seconds, default=None)
    least, place = math.inf if alone is None else alone.seconds, without_cache(plan.places)
    # Things are moved only for a division that is predicted to be faster, not for one that a profile has to try.
    helped = [one for one in fitting if one.division is not None]
    helped = [one for one in helped if one.seconds < least or without_cache(one.setup.placement) == place]
    helped = [one for one in helped if one.setup.padding is None or worth(one) * one.setup.members < least]
    best = min(helped, key=worth, default=None)
    best = None if best is None or best.seconds > NEARLY * least else best
    known = estimate.cost.epoch_seconds if best is None else best.seconds
    return alone if alone is not None and alone.seconds < known and _elsewhere(alone, best, place) else best


def _elsewhere(alone: Candidate, best: Candidate | None, place: Placement) -> bool:
    """Whether no profile of ``best``, or of what was planned at ``place``, would come to ``alone``."""
    other = place if best is None else without_cache(best.setup.placement)
    return without_cache(alone.setup.placement) != other


def _moved(
    best: Candidate, fitting: Sequence[Candidate], plan: Plan, own: Sequence[Task], estimator: Estimator
) -> tuple[Plan, Estimate]:
    """The plan as ``best`` is, with what it then takes."""
    placement, training = best.setup.placement, best.setup.training
    stats, machine = estimator.stats(own[0]), estimator.machine
    former = reasons(plan.places, own[0], stats, machine)
    why = (*(one for one in plan.why if one not in former), *reasons(placement, own[0], stats, machine))
    if best.division is not None:
        why += (f"batches: {best.division.words()} ({best.figures()}), until phases are measured",)
    phases = best.times.to_dict() if best.measured and best.times is not None else {}
    moved = replace(plan, placement=placement, division=best.division, phases=phases, why=why)
    estimate = _dry_run(moved, own, estimator)
    more = best.device_bytes - estimate.cost.total_bytes
    sizes = {name: getattr(estimate.cost, name) + more for name in SIZES}
    # A profile leaves no batch to a side that only slows the other down.
    whole = min(one.seconds for one in (best, *_alone_there(best, fitting)))
    trained = min(training.epoch_seconds, whole)
    left = trained / max(training.epoch_seconds, 1e-12)
    steps = {name: left * seconds for name, seconds in training.phases.items()}
    beside = {"gpu": trained, "pcie": whole - trained}, {**steps, "transfer": whole - trained}
    cost = replace(estimate.cost, **sizes, seconds=beside[0], phases=beside[1], bytes=_kinds(best, estimate.cost))
    return replace(moved, cost=cost.to_dict()), replace(estimate, cost=cost)


def _alone_there(best: Candidate, fitting: Sequence[Candidate]) -> list[Candidate]:
    return [one for one in fitting if one.division is None and one.setup.placement == best.setup.placement]


def _dry_run(plan: Plan, own: Sequence[Task], estimator: Estimator) -> Estimate:
    """What a group takes as ``plan`` has placed it, less its cache and prepared batches."""
    before, there = estimator.placement(own[0]), replace(plan.places, cache_bytes=0)
    estimator.place(own[0], there)
    try:
        return estimator.together(own, replace(plan, placement=there))
    finally:
        estimator.place(own[0], before)


def _kinds(best: Candidate, cost: Cost) -> dict[str, int]:
    """Bytes by kind, of a dry run with ``cost`` that knew nothing of caches and prepared batches."""
    cache, padding = best.setup.placement.cache_bytes, best.setup.padding
    prepared = best.device_bytes - best.setup.device_bytes + (padding.device_bytes if padding is not None else 0)
    more = {"prepared": prepared, "cache": cache}
    return {**cost.bytes, **{name: size for name, size in more.items() if size}}


def words(candidate: Candidate) -> str:
    """A runner-up in one line."""
    return f"{candidate.words()}: {candidate.figures()}"
