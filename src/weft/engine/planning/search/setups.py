"""Setups that a group could train by: the whole graph or batches, where things lie, caches, stack sizes, precisions.

A dry run takes a good part of a second, so few are made: of the task's own mode, and of the first placement that can
fit. The other placements, caches and stack sizes follow from that one by arithmetic, and one of them that turns out to
be fastest gets a dry run of its own (:meth:`Setups.exact`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from weft.core.errors import WeftError
from weft.core.graph_stats import GraphStats
from weft.core.placement import Placement
from weft.core.plan import Plan, PlanOptions
from weft.core.task import Task
from weft.engine.planning.estimator import Estimate, Estimator
from weft.planner.division.setup import Setup, elsewhere, without_cache
from weft.planner.sampling.places import candidates, feature_bytes, with_cache
from weft.planner.training_mode import may_sample

OTHER_PRECISIONS = {"fp32": ("tf32", "bf16"), "tf32": ("bf16",), "bf16": ()}
LOOK_SECONDS = 0.9  # of dry runs, after which none is made for a setup that needs a setting
TOO_LARGE = 1.1  # times the budget that a placement without a dry run is worked out to need: that is about right
CACHE_SHARES = (0.95, 0.5, 0.25)  # of what the budget leaves


class Setups:
    """All setups of a group of ``tasks``; ``begin``: when the search began."""

    def __init__(
        self, tasks: Sequence[Task], estimator: Estimator, room: int, options: PlanOptions, begin: float
    ) -> None:
        self._tasks, self._estimator, self._room, self._options = tasks, estimator, room, options
        self._begin = begin
        self._known: dict[tuple[str, str, Placement], Setup] = {}  # of dry runs, by how they were evaluated

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
        before, setups, left = estimator.placement(task), list[Setup](), list[Placement]()
        try:
            if plan is not None:
                setups += self._placed(task, before, plan)
            for places in _by_place(candidates(task, stats, estimator.machine, self._options)):
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
    def _has(setups: Iterable[Setup], place: Placement) -> bool:
        same = without_cache(place)
        return any((one.placement.features, one.placement.topology) == (same.features, same.topology) for one in setups)

    def _decided(self, setups: Iterable[Setup]) -> bool:
        """Whether a placement is known that fits; a cache that was asked for is always priced exactly."""
        return not self._wants_cache and any(one.device_bytes <= self._room for one in setups)

    def _may_fit(self, task: Task, place: Placement, stats: GraphStats) -> bool:
        """Whether what lies on the device leaves anything of the budget at all."""
        features = feature_bytes(task, stats) if place.features == "gpu" else 0
        return features + (4 * stats.num_edges if place.topology == "gpu" else 0) <= self._room

    def _first_that_fits(self, task: Task, places: Sequence[Placement], plan: Plan | None) -> list[Setup]:
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

    def _too_large(self, task: Task, place: Placement) -> bool:
        known = self._known.get((task.mode, task.precision, _evaluated(place)))
        if known is None:
            return False
        moved = elsewhere(known, place, self._estimator.stats(task))
        return moved.device_bytes > TOO_LARGE * self._room

    def _placed(self, task: Task, place: Placement, plan: Plan | None) -> list[Setup]:
        self._estimator.place(task, place)
        estimate = self._estimate(task, None if plan is None else replace(plan, placement=place))
        training, taken = estimate.trained or estimate.cost, estimate.cost.total_bytes
        return self._with_caches(Setup(task, without_cache(place), training, taken, _members(plan)), place)

    def _with_caches(self, setup: Setup, place: Placement) -> list[Setup]:
        """Without a cache, and with caches of parts of what is left; only those where a cache was asked for."""
        stats, cached = self._estimator.stats(setup.task), list[Setup]()
        for share in CACHE_SHARES if place.cached else ():
            left = int(share * (self._room - setup.device_bytes))
            found = with_cache(place, setup.task, stats, self._options, left)
            if found.cache_bytes and all(found != one.placement for one in cached):
                cached.append(replace(setup, placement=found, device_bytes=setup.device_bytes + found.cache_bytes))
        return cached if cached and self._wants_cache else [setup, *cached]

    @property
    def _wants_cache(self) -> bool:
        """Whether a cache was asked for: then there is none without."""
        options = self._options
        asked = options.cache is not None or options.cache_policy is not None
        return asked or "cached" in (options.features, options.topology)

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


def _evaluated(place: Placement) -> Placement:
    """The same for placements that differ in where things lie alone."""
    return replace(place, features="host", topology="host", cache_bytes=0, overlap=False)


def _evaluated_as(known: Placement, place: Placement) -> Placement:
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


def _by_place(places: Iterable[Placement]) -> list[list[Placement]]:
    """Placements by where features and edges lie, in their order."""
    found: dict[tuple[str, str], list[Placement]] = {}
    for place in places:
        found.setdefault((place.features, place.topology), []).append(place)
    return list(found.values())
