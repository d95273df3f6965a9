"""Choose how a group trains: every setup that the estimator can price, through the planner's search."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.core.compatibility import group_key
from weft.core.cost import SIZES, Cost
from weft.core.division import PhaseTimes
from weft.core.errors import SpecError, WeftError
from weft.core.graph_stats import GraphStats
from weft.core.placement import DataPlacement
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.task import Task
from weft.core.units import parse_bytes, show_bytes
from weft.engine.estimator import NONE, Estimate, Estimator
from weft.engine.machine import Given, find_machine, load_calibration
from weft.planner.division.choose import Candidate, Choice, Search, Setup, choose, elsewhere, without_cache, worth
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.grouping.limits import GroupLimits
from weft.planner.placement import (
    CHUNKS,
    MODE_IS_SET,
    candidates,
    feature_bytes,
    may_sample,
    reasons,
    with_cache,
)

# ---- What measured phase times are of: a key that is equal for groups whose batches and steps are alike.

PLAIN = (str, int, float, tuple)  # values whose text says what they are


def phases_key(tasks: Sequence[Task], place: DataPlacement, digest: str, trainer: str = "gpu", buckets: int = 1) -> str:
    """Of ``tasks`` that share every batch of the graph with fingerprint ``digest``, on ``trainer``.

    ``trainer``: what tells the hardware from other hardware. ``buckets``: sizes that batches are padded to.
    """
    first = tasks[0]
    shape = (first.model_name, first.layers, first.hidden, first.precision, len(tasks))
    where = (place.features, place.topology, place.cache_bytes)
    sizes = (f"{buckets} sizes",) if buckets > 1 else ()
    of_model = _of_model(first)
    return " ".join(map(str, (digest, trainer, *shape, *of_model, *first.fanouts, first.batch, *where, *sizes)))


def _of_model(task: Task) -> Iterator[str]:
    """What else the step of a model depends on: heads, aggregator, norm and the like, where they are not the usual."""
    names = ("norm", "residual", *(task.traits.shaping if task.traits is not None else task.given_to_model()))
    found = {name: getattr(task, name) for name in names} | dict(task.model_args)
    for name, value in sorted(found.items()):
        if value not in (None, False) and isinstance(value, PLAIN):
            yield f"{name}={value}"


# ---- Setups that a group could train by: the whole graph or batches, where things lie, caches, stack sizes,
# precisions.
#
# A dry run takes a good part of a second, so few are made: of the task's own mode, and of the first placement that can
# fit. The other placements, caches and stack sizes follow from that one by arithmetic, and one of them that turns out
# to
# be fastest gets a dry run of its own (:meth:`Setups.exact`).

OTHER_PRECISIONS = {"fp32": ("tf32", "bf16"), "tf32": ("bf16",), "bf16": ()}
LOOK_SECONDS = 0.9  # of dry runs, after which none is made for a setup that needs a setting
TOO_LARGE = 1.1  # times the budget that a placement without a dry run is worked out to need: that is about right
CACHE_SHARES = (0.95, 0.5, 0.25)  # of what the budget leaves


class Setups:
    """All setups of a group of ``tasks``; ``begin``: when the search began."""

    def __init__(
        self, tasks: Sequence[Task], estimator: Estimator, room: int, options: RunOptions, begin: float
    ) -> None:
        self._tasks, self._estimator, self._room, self._options = tasks, estimator, room, options
        self._begin = begin
        self._known: dict[tuple[str, str, DataPlacement], Setup] = {}  # of dry runs, by how they were evaluated

    def found(self, plan: Plan | None) -> list[Setup]:
        """The task's own mode first."""
        task = self._tasks[0]
        setups = self._of(task, plan)
        if may_sample(task):
            setups += self._of(task.with_values(mode="sampled"), None)
        elif task.sampled and task.traits is not None:
            setups += self._in_time(task.with_values(mode="full", fanout=None), "mode='full'")
        for precision in OTHER_PRECISIONS.get(task.precision, ()):
            setups += self._in_time(task.with_values(precision=precision), f"precision='{precision}'")
        return setups

    def _in_time(self, task: Task, condition: str) -> list[Setup]:
        if time.perf_counter() - self._begin >= LOOK_SECONDS:
            return []
        try:
            return [replace(one, condition=condition) for one in self._of(task, None)[:2]]
        except WeftError:
            return []

    def _of(self, task: Task, plan: Plan | None) -> list[Setup]:
        setups = self._sampled(task, plan) if task.sampled else [self._whole(task, plan)]
        return setups if plan is not None else setups + self._stacked(task, setups)

    def _whole(self, task: Task, plan: Plan | None) -> Setup:
        cost = self._estimate(task, plan).cost
        return Setup(task, self._estimator.plan(task).places, cost, cost.total_bytes, _members(plan))

    def _estimate(self, task: Task, plan: Plan | None) -> Estimate:
        if plan is not None and len(plan.members) > 1:
            return self._estimator.together(list(self._tasks), plan)
        return self._estimator.alone(task)

    # ---- stacks --------------------------------------------------------------------------------------

    def _stacked(self, task: Task, setups: Sequence[Setup]) -> list[Setup]:
        """The same with 2, 4, ... and all of the tasks in one step: what one task more takes is the same everywhere."""
        sizes = _stack_sizes(len(self._tasks))
        exact = next((one for one in setups if not one.rough), None)
        if not sizes or exact is None:
            return []
        before = self._estimator.placement(task)
        self._estimator.place(task, exact.placement) if task.sampled else None
        try:
            estimates = {size: self._estimator.alike(task, size) for size in sizes}
        finally:
            self._estimator.place(task, before) if task.sampled else None
        alone = exact.device_bytes - exact.placement.cache_bytes
        return [
            replace(
                one,
                training=estimate.trained or estimate.cost,
                device_bytes=one.device_bytes + estimate.cost.total_bytes - alone,
                members=size,
            )
            for size, estimate in estimates.items()
            for one in setups
        ]

    # ---- placements ----------------------------------------------------------------------------------

    def _sampled(self, task: Task, plan: Plan | None) -> list[Setup]:
        """One per placement and share of a cache; the one that was planned first."""
        estimator, stats = self._estimator, self._estimator.stats(task)
        before, setups, left = estimator.placement(task), list[Setup](), list[DataPlacement]()
        try:
            if plan is not None:
                setups += self._placed(task, before, plan)
            for places in _by_place(candidates(task, stats, estimator.machine, self._options.placement)):
                if self._has(setups, places[0]):
                    continue
                if self._decided(setups) or not self._may_fit(task, places[0], stats):
                    left.append(places[0])
                    continue
                setups += self._first_that_fits(task, places, plan)
            setups = setups or self._first_that_fits(task, [left.pop()], plan)
            for place in (_evaluated_as(setups[0].placement, one) for one in left):
                setups += self._with_caches(elsewhere(setups[0], place, stats), place)
        finally:
            estimator.place(task, before)
        return setups

    @staticmethod
    def _has(setups: Iterable[Setup], place: DataPlacement) -> bool:
        same = without_cache(place)
        return any((one.placement.features, one.placement.topology) == (same.features, same.topology) for one in setups)

    def _decided(self, setups: Iterable[Setup]) -> bool:
        """Whether a placement is known that fits; a cache that was asked for is always priced exactly."""
        return not self._wants_cache and any(one.device_bytes <= self._room for one in setups)

    def _may_fit(self, task: Task, place: DataPlacement, stats: GraphStats) -> bool:
        """Whether what lies on the device leaves anything of the budget at all."""
        features = feature_bytes(task, stats) if place.features == "gpu" else 0
        return features + (4 * stats.num_edges if place.topology == "gpu" else 0) <= self._room

    def _first_that_fits(self, task: Task, places: Sequence[DataPlacement], plan: Plan | None) -> list[Setup]:
        """Evaluated on the whole graph, else in chunks of nodes, the largest that fit; else in the smallest.

        What does not fit by far, as another placement evaluated so tells, gets no dry run.
        """
        found: list[Setup] = []
        for place in places:
            if place is not places[-1] and self._too_large(task, place):
                continue
            found = self._placed(task, place, plan)
            self._known[task.mode, task.precision, _evaluated(place)] = found[0]
            if found[0].device_bytes <= self._room:
                break
        return found

    def _too_large(self, task: Task, place: DataPlacement) -> bool:
        known = self._known.get((task.mode, task.precision, _evaluated(place)))
        if known is None:
            return False
        moved = elsewhere(known, place, self._estimator.stats(task))
        return moved.device_bytes > TOO_LARGE * self._room

    def _placed(self, task: Task, place: DataPlacement, plan: Plan | None) -> list[Setup]:
        self._estimator.place(task, place)
        estimate = self._estimate(task, None if plan is None else replace(plan, placement=place))
        training, taken = estimate.trained or estimate.cost, estimate.cost.total_bytes
        return self._with_caches(Setup(task, without_cache(place), training, taken, _members(plan)), place)

    def _with_caches(self, setup: Setup, place: DataPlacement) -> list[Setup]:
        """Without a cache, and with caches of parts of what is left; only those where a cache was asked for."""
        stats, cached = self._estimator.stats(setup.task), list[Setup]()
        for share in CACHE_SHARES if place.cached else ():
            left = int(share * (self._room - setup.device_bytes))
            found = with_cache(place, setup.task, stats, self._options.placement, left)
            if found.cache_bytes and all(found != one.placement for one in cached):
                cached.append(replace(setup, placement=found, device_bytes=setup.device_bytes + found.cache_bytes))
        return cached if cached and self._wants_cache else [setup, *cached]

    @property
    def _wants_cache(self) -> bool:
        """Whether a cache was asked for: then there is none without."""
        placement = self._options.placement
        asked = placement.cache is not None or placement.cache_policy is not None
        return asked or "cached" in (placement.features, placement.topology)

    # ---- from rough to exact -------------------------------------------------------------------------

    def exact(self, setups: Sequence[Setup], rough: Setup, plan: Plan | None) -> list[Setup]:
        """``setups`` with a dry run of ``rough`` and of those that differ from it in their caches alone."""
        task, members = rough.task, rough.members
        same = [one for one in setups if one.rough and _alike(one, rough)]
        before = self._estimator.placement(task)
        self._estimator.place(task, rough.placement)
        try:
            alone = plan is not None or members == 1
            estimate = self._estimate(task, plan) if alone else self._estimator.alike(task, members)
        finally:
            self._estimator.place(task, before)
        training, taken = estimate.trained or estimate.cost, estimate.cost.total_bytes
        sure = [
            replace(one, training=training, device_bytes=taken + one.placement.cache_bytes, rough=False) for one in same
        ]
        return [one for one in setups if not any(one is other for other in same)] + sure


def _evaluated(place: DataPlacement) -> DataPlacement:
    """The same for placements that differ in where things lie alone."""
    return replace(place, features="host", topology="host", cache_bytes=0, overlap=False)


def _evaluated_as(known: DataPlacement, place: DataPlacement) -> DataPlacement:
    """``place``, evaluated as ``known`` is, which its bytes are worked out from."""
    return replace(place, evaluation=known.evaluation, chunk_edges=known.chunk_edges)


def _members(plan: Plan | None) -> int:
    return 1 if plan is None else len(plan.members)


def _stack_sizes(tasks: int) -> list[int]:
    """2, 4, 8, ... and all."""
    return sorted({size for power in range(1, 12) if (size := 1 << power) <= tasks} | {tasks} - {1})


def _alike(one: Setup, other: Setup) -> bool:
    same = (one.task, one.members) == (other.task, other.members)
    return same and without_cache(one.placement) == without_cache(other.placement)


def _by_place(places: Iterable[DataPlacement]) -> list[list[DataPlacement]]:
    """Placements by where features and edges lie, in their order."""
    found: dict[tuple[str, str], list[DataPlacement]] = {}
    for place in places:
        found.setdefault((place.features, place.topology), []).append(place)
    return list(found.values())


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
    options: RunOptions = NONE,
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
    options: RunOptions = NONE,
) -> list[tuple[Plan, Estimate]]:
    """Planned groups, those whose batches the host could help to prepare with a division and room for its buffers.

    Who prepares how many is decided by measured phases when the group begins, so a division that is predicted to be a
    little slower is planned as well.
    """
    return [_with_division(plan, estimate, tasks, estimator, room, options) for plan, estimate in found]


def _with_division(
    plan: Plan, estimate: Estimate, tasks: Mapping[str, Task], estimator: Estimator, room: int, options: RunOptions
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


def _elsewhere(alone: Candidate, best: Candidate | None, place: DataPlacement) -> bool:
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


# ---- Choose where the features and edges of sampled tasks lie: the first placement that fits into the budget.


def with_places(tasks: Sequence[Task], estimator: Estimator, room: int, options: RunOptions = NONE) -> None:
    """Tell ``estimator`` where the things of sampled ``tasks`` lie; the least that was tried if nothing fits."""
    for name, value in options.placement.given.items():
        if not any(task.sampled for task in tasks):
            raise SpecError(
                f"{name}={value!r} would have no effect: task {tasks[0].label!r} trains on the whole graph, which lies "
                "on the device; mode='sampled' reads it batch by batch"
            )
    sharing: dict[Hashable, list[Task]] = {}
    for task in tasks:
        if task.sampled:
            sharing.setdefault(group_key(task, estimator.stats(task).multilabel), []).append(task)
    for alike in sharing.values():
        if place_one(alike[0], estimator, room, options):
            evaluate_by_layers(alike[0], len(alike), estimator, room - (options.placement.cache or 0))


def evaluate_by_layers(task: Task, count: int, estimator: Estimator, room: int) -> None:
    """Evaluate ``count`` tasks like ``task`` layer by layer if more of them then share every batch, and that is faster.

    An evaluation on the whole graph may take many times what training does, for every task of a stack.
    """
    placed = estimator.placement(task)
    if count < 2 or placed.evaluation != "whole" or task.traits is None or estimator.machine.device != "cuda":
        return
    best = _seconds_in_stacks(task, count, estimator, room)
    for edges in CHUNKS:
        if best.size == count:
            break
        other = replace(placed, evaluation="layers", chunk_edges=edges)
        estimator.place(task, other)
        found = _seconds_in_stacks(task, count, estimator, room)
        if found.seconds < best.seconds:
            best, placed = found, other
    estimator.place(task, placed)


class _Stacks(NamedTuple):
    size: int
    seconds: float


def _seconds_in_stacks(task: Task, count: int, estimator: Estimator, room: int) -> _Stacks:
    """Seconds of an epoch of ``count`` tasks in stacks as large as fit."""
    sizes = sorted({count, *(1 << power for power in range(count.bit_length()))}, reverse=True)
    fitting = (size for size in sizes if size <= count and estimator.alike(task, size).cost.total_bytes <= room)
    size = next(fitting, 1)
    return _Stacks(size, estimator.alike(task, size).cost.epoch_seconds * -(-count // size))


def place_one(task: Task, estimator: Estimator, room: int, options: RunOptions = NONE) -> bool:
    """Place the things of ``task`` and of those that share its batches; whether it then fits."""
    cache, needed = options.placement.cache or 0, 0
    if cache > room:
        raise SpecError(f"cache={show_bytes(cache)} is larger than the budget of {show_bytes(room)}")
    for placement in candidates(task, estimator.stats(task), estimator.machine, options.placement):
        estimator.place(task, placement)
        needed = estimator.alone(task).cost.total_bytes
        if needed + cache <= room:
            return True
    if cache and needed <= room:
        raise SpecError(
            f"cache={show_bytes(cache)} leaves {show_bytes(room - cache)} of the budget of {show_bytes(room)}, but "
            f"task {task.label!r} needs {show_bytes(needed)} beside it"
        )
    return False


# ---- Choose sampled training for tasks that leave the mode open and do not fit as a whole; then where their things
# lie.


def with_modes(tasks: Sequence[Task], estimator: Estimator, room: int, options: RunOptions = NONE) -> list[Task]:
    """``tasks``, with ``mode="sampled"`` where ``mode="auto"`` needs more than ``room`` on the whole graph.

    A task that would not fit sampled either is left as it is, and refused with what it needs as a whole. The estimator
    then knows where things lie; ``options`` say so of sampled tasks, and are refused if there is none.
    """
    found = [_sampled(task) if _to_sample(task, estimator, room, options) else task for task in tasks]
    with_places(found, estimator, room, options)
    return found


def _to_sample(task: Task, estimator: Estimator, room: int, options: RunOptions) -> bool:
    return may_sample(task) and _needs_sampling(task, estimator, room, options)


def with_reason(plan: Plan, tasks: Mapping[str, Task], room: int) -> Plan:
    """``plan``, which says so if its members are sampled because the whole graph does not fit into ``room`` bytes.

    ``tasks``: as they were given, by name.
    """
    if plan.mode != "sampled" or any(tasks[name].sampled for name in plan.members):
        return plan
    told = f"the whole graph does not fit into {show_bytes(room)}"
    return replace(plan, why=tuple(reason.replace(MODE_IS_SET, told) for reason in plan.why))


def in_mode(task: Task, mode: str) -> Task:
    """``task`` in the mode of the plan that it trains by."""
    return _sampled(task) if mode == "sampled" and not task.sampled else task


def _sampled(task: Task) -> Task:
    return task.with_values(mode="sampled")


def _needs_sampling(task: Task, estimator: Estimator, room: int, options: RunOptions = NONE) -> bool:
    limits = GroupLimits(estimator.stats(task), estimator.machine.device, estimator.machine, budget=room)
    if limits.surely_fits([task]):  # by several times, so that no dry run is needed to know
        return False
    try:
        if estimator.alone(task).cost.total_bytes <= room:
            return False
        return place_one(_sampled(task), estimator, room, options)
    except WeftError:
        if options.placement.given:  # what is wrong with them
            raise
        return False
