"""Choose how a group trains: every setup that the estimator can price, through the planner's search."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core.cost import SIZES, Cost
from weft.core.division import PhaseTimes
from weft.core.errors import WeftError
from weft.core.placement import Placement
from weft.core.plan import Plan, PlanOptions
from weft.core.task import Task
from weft.core.units import parse_bytes
from weft.engine.base.machines import Given, find_machine, load_calibration
from weft.engine.planning.estimator import NONE, Estimate, Estimator
from weft.engine.planning.phase_keys import phases_key
from weft.planner.division.choose import Candidate, Choice, Setup, choose, elsewhere, without_cache
from weft.planner.sampling.places import candidates, reasons, with_cache
from weft.planner.training_mode import may_sample

OTHER_PRECISIONS = {"fp32": ("tf32", "bf16"), "tf32": ("bf16",), "bf16": ()}
NEARLY = 1.25  # times the seconds of one side alone: rates are rough, and a profile decides
LOOK_SECONDS = 1.2  # of dry runs for setups that nobody has asked for


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


def choose_for(task: Task, machine: Given = None, budget: str | float | None = None) -> Chosen:
    """How ``task`` trains fastest on ``machine`` within ``budget`` bytes."""
    there = find_machine(machine)
    estimator = Estimator(there, load_calibration(there))
    room = there.memory_bytes if budget is None else parse_bytes(budget)
    begin = time.perf_counter()
    return choose_group([task], None, estimator, room, begin=begin)


def choose_group(
    tasks: Sequence[Task],
    plan: Plan | None,
    estimator: Estimator,
    room: int,
    options: PlanOptions = NONE,
    begin: float | None = None,
) -> Chosen:
    """How the group of ``tasks`` trains fastest; ``plan``: as it was grouped (None: a group of its first task)."""
    begin = time.perf_counter() if begin is None else begin
    setups = _Setups(tasks, estimator, room, options, begin).found(plan)
    stats = estimator.stats(tasks[0])
    known = estimator.calibration.phases if estimator.calibration is not None else {}
    digest = stats.fingerprint().digest

    def measured(setup: Setup) -> PhaseTimes | None:
        same = setup.captured and not setup.condition
        return known.get(phases_key([setup.task] * setup.members, setup.placement, digest)) if same else None

    # The whole graph has exact gradients: taken if it fits and nothing says otherwise.
    whole = tasks[0].mode != "sampled"
    choice = choose(setups, stats, estimator.machine, room, measured, lambda one: whole and not one.setup.task.sampled)
    return Chosen(_executable(choice, plan, estimator), choice, time.perf_counter() - begin)


def _executable(choice: Choice, plan: Plan | None, estimator: Estimator) -> Plan:
    """The plan of the best candidate, as a run takes it."""
    best = choice.best
    base = plan or estimator.plan(best.setup.task)
    phases = best.times.to_dict() if best.measured and best.times is not None else {}
    placed = {"placement": best.setup.placement} if best.setup.task.sampled else {}
    mode = "sampled" if best.setup.task.sampled else "full"
    why = (*base.why, *choice.why)
    cost = {**base.cost} or estimator.alone(best.setup.task).cost.to_dict()
    return replace(base, mode=mode, division=best.division, phases=phases, cost=cost, why=why, **placed)


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
    chosen = choose_group(own, plan, estimator, room, options, begin=-LOOK_SECONDS)
    ways = [chosen.choice.best, *chosen.choice.runners_up]
    fitting = [one for one in ways if one.device_bytes <= room and not one.setup.condition]
    alone = min((one.seconds for one in fitting if one.division is None), default=math.inf)
    # Things are moved only for a division that is predicted to be faster, not for one that a profile has to try.
    helped = [one for one in fitting if one.division is not None]
    helped = [
        one for one in helped if one.seconds < alone or without_cache(one.setup.placement) == without_cache(place)
    ]
    best = min(helped, key=lambda one: one.seconds, default=None)
    if best is None or best.seconds > NEARLY * alone:
        return plan, estimate
    phases = best.times.to_dict() if best.measured and best.times is not None else {}
    told = f"batches: {best.division.words() if best.division else ''} ({best.figures()}), until phases are measured"
    about = (own[0], estimator.stats(own[0]), estimator.machine)
    former = reasons(plan.places, *about)
    why = (*(one for one in plan.why if one not in former), *reasons(best.setup.placement, *about), told)
    moved = replace(plan, placement=best.setup.placement, division=best.division, phases=phases, why=why)
    more = best.device_bytes - estimate.cost.total_bytes
    sizes = {name: getattr(estimate.cost, name) + more for name in SIZES}
    buffers = best.device_bytes - best.setup.device_bytes
    kinds = {name: size for name, size in estimate.cost.bytes.items() if name != "cache"} | {"prepared": buffers}
    kinds |= {"cache": best.setup.placement.cache_bytes} if best.setup.placement.cache_bytes else {}
    whole = min(best.seconds, alone)  # a profile leaves no batch to a side that only slows the other down
    trained = min(estimate.trained.epoch_seconds if estimate.trained else 0.0, whole)
    seconds = {"gpu": trained, "pcie": whole - trained}
    cost = replace(estimate.cost, **sizes, bytes=kinds, seconds=seconds)
    return replace(moved, cost=cost.to_dict()), replace(estimate, cost=cost)


class _Setups:
    """All setups of a group; those that need dry runs of their own only while there is time."""

    def __init__(
        self, tasks: Sequence[Task], estimator: Estimator, room: int, options: PlanOptions, begin: float
    ) -> None:
        self._tasks, self._estimator, self._room, self._options = tasks, estimator, room, options
        self._begin = begin

    def found(self, plan: Plan | None) -> list[Setup]:
        """The task's own mode first."""
        task = self._tasks[0]
        setups = self._of(task, plan)
        if may_sample(task):
            setups += self._of(task.with_values(mode="sampled"), None)
        elif task.sampled and task.traits is not None:
            condition = "mode='full'" if task.mode == "sampled" else ""
            setups += self._in_time(task.with_values(mode="full", fanout=None), condition or "mode='full'")
        for precision in OTHER_PRECISIONS.get(task.precision, ()):
            setups += self._in_time(task.with_values(precision=precision), f"precision='{precision}'")
        return setups

    def _in_time(self, task: Task, condition: str) -> list[Setup]:
        if not self._has_time:
            return []
        try:
            return [replace(one, condition=condition) for one in self._of(task, None)[:2]]
        except WeftError:
            return []

    def _of(self, task: Task, plan: Plan | None) -> list[Setup]:
        if not task.sampled:
            estimate = self._estimate(task, plan)
            place = self._estimator.plan(task).places
            return [Setup(task, place, estimate.cost, estimate.cost.total_bytes, self._members(plan))]
        return self._sampled(task, plan)

    def _members(self, plan: Plan | None) -> int:
        return 1 if plan is None else len(plan.members)

    def _estimate(self, task: Task, plan: Plan | None) -> Estimate:
        if plan is not None and len(plan.members) > 1:
            return self._estimator.together(list(self._tasks), plan)
        return self._estimator.alone(task)

    def _sampled(self, task: Task, plan: Plan | None) -> list[Setup]:
        """One per placement, with and without a cache; the one that was planned first."""
        estimator, stats = self._estimator, self._estimator.stats(task)
        before, setups, seen = estimator.placement(task), list[Setup](), set()
        try:
            for place in self._order(candidates(task, stats, estimator.machine, self._options), before, plan):
                estimator.place(task, place)
                fits = any(one.device_bytes <= self._room for one in setups)
                known = estimator.knows([task]) or (plan is not None and place == before)
                if (place.features, place.topology) in seen:
                    continue
                seen.add((place.features, place.topology))
                exact = known or not fits or self._has_time or self._wants_cache
                setups += self._placed(task, place, plan) if exact else [elsewhere(setups[0], place, stats)]
        finally:
            estimator.place(task, before)
        return setups

    @staticmethod
    def _order(places: Iterable[Placement], planned: Placement, plan: Plan | None) -> list[Placement]:
        """The placement that was planned first, then the others, the one that takes most of the device first."""
        return [*([planned] if plan is not None else []), *places]

    @property
    def _has_time(self) -> bool:
        return time.perf_counter() - self._begin < LOOK_SECONDS

    def _placed(self, task: Task, place: Placement, plan: Plan | None) -> list[Setup]:
        _estimator, stats = self._estimator, self._estimator.stats(task)
        moved = None if plan is None else replace(plan, placement=place)
        estimate = self._estimate(task, moved)
        training = estimate.trained or estimate.cost
        taken, members = estimate.cost.total_bytes, self._members(plan)
        cached = with_cache(place, task, stats, self._options, (self._room - taken) // 2)
        with_it = [Setup(task, cached, training, taken + cached.cache_bytes, members)] if cached.cache_bytes else []
        if with_it and self._wants_cache:
            return with_it
        return [Setup(task, without_cache(place), training, taken, members), *with_it]

    @property
    def _wants_cache(self) -> bool:
        """Whether a cache was asked for: then there is none without."""
        options = self._options
        asked = options.cache is not None or options.cache_policy is not None
        return asked or "cached" in (options.features, options.topology)


def words(candidate: Candidate) -> str:
    """A runner-up in one line."""
    return f"{candidate.words()}: {candidate.figures()}"
