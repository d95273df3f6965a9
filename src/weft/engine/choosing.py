"""Decide how sampled tasks train: where features and edges lie, which batches the host prepares, and in which mode.

A dry run takes a good part of a second, so few are made: of the task's own mode, and of the first placement that can
fit. The other placements and caches follow from that one by arithmetic, and one of them that turns out to be fastest
gets a dry run of its own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core.compatibility import group_key
from weft.core.cost import SIZES
from weft.core.division import PhaseTimes
from weft.core.errors import SpecError, WeftError
from weft.core.placement import DataPlacement, on_device
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.task import FIT, Task
from weft.core.units import show_bytes
from weft.core.wording import option
from weft.engine.estimator import NONE, Estimate, Estimator, groups_within_budget
from weft.planner.cost.inductor import whether_to_compile
from weft.planner.division.ways import BESIDES_WAITING, Pricing, Way, batch_bytes, without_cache
from weft.planner.grouping.limits import GroupLimits
from weft.planner.placement import CHUNKS, MODE_IS_SET, candidates, may_sample, reasons, with_cache
from weft.planner.transfers import with_batches

OTHER_PRECISIONS = {"fp32": ("tf32", "bf16"), "tf32": ("bf16",), "bf16": ()}
CACHE_SHARES = (0.95, 0.5, 0.25)  # of what the budget leaves
NEARLY = 1.25  # times the seconds of one side alone: rates are rough, and a profile decides
USUAL_BATCH = 1024  # of a task that leaves it open
CONTENDERS = 3  # ways that get a dry run of their own because they seem to be the fastest


def phases_key(tasks: Sequence[Task], placement: DataPlacement, digest: str, trainer: str = "gpu") -> str:
    """Cache key for measured phase times of ``tasks`` that share every batch of the graph with that ``digest``.

    ``trainer`` distinguishes the hardware.
    """
    first = tasks[0]
    # What else the step of a model depends on: heads, aggregator, norm and the like, if they are not the default.
    names = ("norm", "residual", *(first.traits.shaping if first.traits is not None else first.given_to_model()))
    values = {name: getattr(first, name) for name in names} | dict(first.model_args)
    model = [
        f"{name}={value}"
        for name, value in sorted(values.items())
        if value not in (None, False) and isinstance(value, (str, int, float, tuple))
    ]
    shape = (first.model_name, first.layers, first.hidden, first.precision, len(tasks))
    where = (placement.features, placement.topology, placement.cache_bytes)
    structures = sorted({f"{task.model_name}x{task.layers}x{task.hidden}" for task in tasks} if len(tasks) > 1 else ())
    more = structures if len(structures) > 1 else ()  # structures that train on the same batches
    return " ".join(map(str, (digest, trainer, *shape, *model, *more, *first.fanouts, first.batch, *where)))


# ---- The ways to train a group.


def ways_to_train(
    tasks: Sequence[Task],
    plan: Plan,
    estimator: Estimator,
    room: int,
    options: RunOptions = NONE,
    settings: bool = False,
) -> list[Way]:
    """All priced ways to train ``tasks``, grouped as in ``plan``; ``settings``: also those that need a setting."""
    listing = _Listing(tasks, plan, estimator, room, options)
    ways = listing.ways(settings)
    stats = estimator.stats(tasks[0])
    phases = estimator.calibration.phases if estimator.calibration is not None else {}
    digest = stats.fingerprint().digest

    def measured(way: Way) -> PhaseTimes | None:
        return None if way.condition else phases.get(phases_key([way.task] * way.members, way.placement, digest))

    # The whole graph has exact gradients: preferred if it fits and the task does not say otherwise.
    whole_first = tasks[0].mode != "sampled"
    pricing = Pricing(stats, estimator.machine, room, measured, options.placement)
    priced = pricing.price(ways)
    for _ in range(CONTENDERS):
        free = [way for way in priced if not way.condition and way.device_bytes <= room]
        contender = min((way for way in free if way.rough), key=lambda way: way.seconds_per_task, default=None)
        exact = [way for way in free if not way.rough]
        if contender is None or (whole_first and any(not way.task.sampled for way in exact)):
            break
        if exact and contender.seconds_per_task >= min(way.seconds_per_task for way in exact):
            break
        ways = listing.with_dry_run(ways, contender)
        priced = pricing.price(ways)
    return priced


@dataclass
class _Listing:
    """Lists the ways of a group without a price."""

    tasks: Sequence[Task]
    plan: Plan
    estimator: Estimator
    room: int
    options: RunOptions

    def ways(self, settings: bool) -> list[Way]:
        """The task's own mode first."""
        task = self.tasks[0]
        ways = self._of(task, self.plan)
        if may_sample(task):
            ways += self._of(task.with_values(mode="sampled"), None)
        if not settings:
            return ways
        changes = [{"precision": precision} for precision in OTHER_PRECISIONS.get(task.precision, ())]
        if task.sampled and task.traits is not None:
            changes.insert(0, {"mode": "full", "fanout": None})
        for change in changes:
            name, value = next(iter(change.items()))
            try:
                changed = self._of(task.with_values(**change), None)[:2]
            except WeftError:
                continue
            ways += [replace(way, condition=f"{name}={value!r}") for way in changed]
        return ways

    def _of(self, task: Task, plan: Plan | None) -> list[Way]:
        estimator, stats = self.estimator, self.estimator.stats(task)
        members = 1 if plan is None else len(plan.members)
        if not task.sampled:
            cost = self._estimate(task, plan, None).cost
            return [Way(task, on_device(estimator.machine.device), cost, cost.total_bytes, members)]
        # One per placement and share of a cache; the planned one first.
        placement = estimator.placement(task)
        if plan is None:
            placement, _ = place_one(task, estimator, self.room, self.options)
        estimate = self._estimate(task, plan, placement)
        training, size = estimate.trained or estimate.cost, estimate.cost.total_bytes
        base = Way(task, without_cache(placement), training, size, members)
        ways = self._with_caches(base, placement)
        # Evaluated as the way whose bytes they are worked out from.
        evaluated = {"evaluation": placement.evaluation, "chunk_edges": placement.chunk_edges}
        tiers = {(base.placement.features, base.placement.topology)}
        for other in candidates(task, stats, estimator.machine, self.options.placement):
            tier = without_cache(other)
            if (tier.features, tier.topology) not in tiers:
                tiers.add((tier.features, tier.topology))
                other = replace(other, **evaluated)
                ways += self._with_caches(base.elsewhere(other, stats), other)
        return ways

    def _estimate(self, task: Task, plan: Plan | None, placement: DataPlacement | None) -> Estimate:
        if plan is not None and len(plan.members) > 1:
            placed = plan if placement is None else replace(plan, placement=placement)
            return self.estimator.together(list(self.tasks), placed)
        return self.estimator.alone(task, placement)

    def _with_caches(self, way: Way, placement: DataPlacement) -> list[Way]:
        """Without a cache, and with caches of parts of the remaining room; only those if a cache was requested."""
        stats, cached = self.estimator.stats(way.task), list[Way]()
        for share in CACHE_SHARES if placement.cached else ():
            room = int(share * (self.room - way.device_bytes))
            filled = with_cache(placement, way.task, stats, self.options.placement, room)
            if filled.cache_bytes and all(filled != other.placement for other in cached):
                cached.append(replace(way, placement=filled, device_bytes=way.device_bytes + filled.cache_bytes))
        options = self.options.placement
        requested = options.cache is not None or options.cache_policy is not None
        requested = requested or "cached" in (options.features, options.topology)
        return cached if cached and requested else [way, *cached]

    def with_dry_run(self, ways: Sequence[Way], rough: Way) -> list[Way]:
        """``ways`` with a dry run of ``rough`` and of those that differ from it in their caches alone."""
        placement = without_cache(rough.placement)
        estimate = self._estimate(rough.task, self.plan, rough.placement)
        training, size = estimate.trained or estimate.cost, estimate.cost.total_bytes
        exact = []
        for way in ways:
            alike = (way.task, way.members) == (rough.task, rough.members)
            if way.rough and alike and without_cache(way.placement) == placement:
                way = replace(way, training=training, device_bytes=size + way.placement.cache_bytes, rough=False)
            exact.append(way)
        return exact


# ---- The groups of a plan, with their caches and divisions, and whether they are compiled.


def decided_groups(
    tasks: Sequence[Task], estimator: Estimator, room: int, options: RunOptions = NONE
) -> list[tuple[Plan, Estimate]]:
    """Groups within ``room`` bytes and their estimates, which are also the plans' ``cost``."""
    by_name, decided = {task.label: task for task in tasks}, []
    for plan, estimate in groups_within_budget(tasks, estimator, room - (options.placement.cache or 0), options.weave):
        members, compiled, why = [by_name[name] for name in plan.members], False, tuple[str, ...]()
        if plan.mode == "sampled":
            plan, estimate = _with_batches(plan, estimate, members, estimator, room, options)
            why = ("not compiled: Inductor is for steps on the whole graph",) if options.compile else ()
        else:
            open_choice = options.compile is None and plan.device == "cuda" and not plan.woven
            gain = estimator.compiling(estimate, members[0], plan) if open_choice else None
            epochs = max(task.epochs for task in members)
            compiled, why = whether_to_compile(options.compile, gain, epochs, plan.device, plan.join)
        why = (*plan.why, *estimate.notes, *why)
        costs = {"cost": estimate.cost.to_dict(), "weights": estimate.weights}
        decided.append((replace(plan, compiled=compiled, why=why, **costs), estimate))
    return decided


def _with_batches(
    plan: Plan, estimate: Estimate, members: Sequence[Task], estimator: Estimator, room: int, options: RunOptions
) -> tuple[Plan, Estimate]:
    """A sampled group with a cache in what is left of ``room``, or a division of its batches with the host.

    The shares are decided by measured phases when the group begins, so a division that is predicted to be a little
    slower is planned as well.
    """
    task, stats, machine = members[0], estimator.stats(members[0]), estimator.machine
    placement = with_cache(plan.places, task, stats, options.placement, room - estimate.cost.total_bytes)
    if placement != plan.places:  # add the bytes and the gain of the cache, which the dry run did not have
        cost = estimate.cost
        if estimate.trained is not None:
            times = {name: getattr(estimate.trained, name) for name in ("seconds", "families", "phases", "uncorrected")}
            cost = with_batches(replace(cost, **times), task, stats, placement, machine)
        taken = placement.cache_bytes
        sizes = {name: getattr(cost, name) + taken for name in SIZES}
        kinds = {**cost.bytes, "cache": taken} if taken else cost.bytes
        plan = replace(plan, placement=placement)
        estimate = replace(estimate, cost=replace(cost, **sizes, bytes=kinds))
    hosted = plan.device == "cuda" and placement.read_by_gpu and not placement.on_device and not placement.overlap
    one_source = len(plan.stack_members) == 1 or all(each.traits and not each.traits.relational for each in members)
    best, why, fitting = None, list(plan.why), list[Way]()
    if hosted and one_source and estimate.trained is not None:
        ways = ways_to_train(members, plan, estimator, room, options)
        fitting = [way for way in ways if way.device_bytes <= room and not way.condition and not way.rough]
        best = faster_way(fitting, plan, estimate, options)
    if best is None and hosted and options.placement.division is not None:
        why.append(f"{option('division', options.placement.division)}: the GPU prepares all batches faster alone")
    if best is None:
        return replace(plan, why=(*why, *reasons(placement, task, stats, machine))), estimate
    why += reasons(best.placement, task, stats, machine)
    prepared = 0
    if best.division is not None:
        why.append(f"batches: {best.division.words()} ({best.figures()}), until phases are measured")
        prepared = (best.division.device_buffer + BESIDES_WAITING) * batch_bytes(best.task, stats)
    phases = best.times.to_dict() if best.measured and best.times is not None else {}
    plan = replace(plan, placement=best.placement, division=best.division, phases=phases, why=tuple(why))
    estimate = estimator.together(members, replace(plan, placement=replace(best.placement, cache_bytes=0)))
    # A profile leaves no batch to a side that only slows the other down.
    there = [way for way in fitting if way.division is None and way.placement == best.placement]
    whole, training = min(way.seconds for way in (best, *there)), best.training
    trained = min(training.epoch_seconds, whole)
    scale = trained / max(training.epoch_seconds, 1e-12)
    more = best.device_bytes - estimate.cost.total_bytes
    kinds = {"prepared": prepared, "cache": best.placement.cache_bytes}
    cost = replace(
        estimate.cost,
        **{name: getattr(estimate.cost, name) + more for name in SIZES},
        seconds={"gpu": trained, "pcie": whole - trained},
        phases={**{name: scale * seconds for name, seconds in training.phases.items()}, "transfer": whole - trained},
        bytes={**estimate.cost.bytes, **{name: size for name, size in kinds.items() if size}},
    )
    return plan, replace(estimate, cost=cost)


def faster_way(fitting: Sequence[Way], plan: Plan, estimate: Estimate, options: RunOptions = NONE) -> Way | None:
    """The division to plan, or where things lie if one side prepares batches faster there; None: as it was planned."""
    alone = min((way for way in fitting if way.division is None), key=lambda way: way.seconds, default=None)
    least, planned = math.inf if alone is None else alone.seconds, without_cache(plan.places)
    # Things are moved only for a division that is predicted to be faster, not for one that a profile has to try.
    divided = [
        way
        for way in fitting
        if way.division is not None and (way.seconds < least or without_cache(way.placement) == planned)
    ]
    best = min(divided, key=lambda way: way.seconds_per_task, default=None)
    if best is not None and isinstance(options.placement.division, float):
        return best  # the user has set the ratio
    if best is not None and best.seconds > NEARLY * least:
        best = None
    seconds = estimate.cost.epoch_seconds if best is None else best.seconds
    if alone is None or alone.seconds >= seconds:
        return best
    # No profile of ``best``, or of what was planned, would come to ``alone`` if it lies elsewhere.
    near = planned if best is None else without_cache(best.placement)
    return alone if without_cache(alone.placement) != near else best


# ---- Where the features and edges of sampled tasks lie: the first placement that fits into the budget.


def with_placements(tasks: Sequence[Task], estimator: Estimator, room: int, options: RunOptions = NONE) -> Estimator:
    """``estimator`` with where the things of sampled ``tasks`` lie; the least that was tried if nothing fits."""
    for name, value in options.placement.given.items():
        if not any(task.sampled for task in tasks):
            raise SpecError(
                f"{option(name, value)} would have no effect: task {tasks[0].label!r} trains on the whole graph, which "
                "lies on the device; mode='sampled' reads it batch by batch"
            )
    sharing: dict[Hashable, list[Task]] = {}
    for task in tasks:
        if task.sampled:
            sharing.setdefault(group_key(task, estimator.stats(task).multilabel), []).append(task)
    placements = {}
    for key, similar in sharing.items():
        placement, fits = place_one(similar[0], estimator, room, options)
        if fits and len(similar) > 1:
            free = room - (options.placement.cache or 0)
            placement = evaluate_by_layers(similar[0], len(similar), placement, estimator, free)
        placements[key] = placement
    hosted = any(p.read_by_gpu and not p.on_device for p in placements.values())
    if options.placement.division is not None and options.hardware is None and not hosted:
        reason = "features and edges lie on the GPU, which prepares all batches; give features='host'"
        raise SpecError(f"{option('division', options.placement.division)} would have no effect: {reason}")
    return estimator.with_placements(placements) if placements else estimator


def evaluate_by_layers(task: Task, count: int, best: DataPlacement, estimator: Estimator, room: int) -> DataPlacement:
    """Evaluate ``count`` tasks like ``task`` layer by layer if more of them then share every batch, and that is faster.

    An evaluation on the whole graph may take many times what training does, for every task of a stack. ``best``: the
    placement so far.
    """
    if best.evaluation != "whole" or task.traits is None or estimator.machine.device != "cuda":
        return best
    sizes = sorted({count, *(1 << power for power in range(count.bit_length()))}, reverse=True)

    def stacked(placement: DataPlacement) -> tuple[int, float]:
        """The size of the largest stack that fits, and the seconds of an epoch of all tasks in such stacks."""
        fitting = (n for n in sizes if n <= count and estimator.alike(task, n, placement).cost.total_bytes <= room)
        size = next(fitting, 1)
        return size, estimator.alike(task, size, placement).cost.epoch_seconds * -(-count // size)

    size, seconds = stacked(best)
    for edges in CHUNKS:
        if size == count:
            break
        layered = replace(best, evaluation="layers", chunk_edges=edges)
        other_size, other_seconds = stacked(layered)
        if other_seconds < seconds:
            best, size, seconds = layered, other_size, other_seconds
    return best


def place_one(task: Task, estimator: Estimator, room: int, options: RunOptions) -> tuple[DataPlacement, bool]:
    """Where the things of ``task`` and of those that share its batches lie, and whether it then fits."""
    cache, needed, placement = options.placement.cache or 0, 0, estimator.placement(task)
    if cache > room:
        raise SpecError(f"cache={show_bytes(cache)} is larger than the budget of {show_bytes(room)}")
    for placement in candidates(task, estimator.stats(task), estimator.machine, options.placement):
        needed = estimator.alone(task, placement).cost.total_bytes
        if needed + cache <= room:
            return placement, True
    if cache and needed <= room:
        raise SpecError(
            f"cache={show_bytes(cache)} leaves {show_bytes(room - cache)} of the budget of {show_bytes(room)}, but "
            f"task {task.label!r} needs {show_bytes(needed)} more"
        )
    return placement, False


# ---- Sampled training for tasks that leave the mode open and do not fit as a whole.


def with_modes(
    tasks: Sequence[Task], estimator: Estimator, room: int, options: RunOptions = NONE
) -> tuple[list[Task], Estimator]:
    """``tasks``, with ``mode="sampled"`` if ``mode="auto"`` needs more than ``room`` on the whole graph.

    ``batch="fit"`` becomes the number that fits, by the task alone, so that it does not depend on others.

    A task that would not fit sampled either is left as it is, and refused with what it needs as a whole. The estimator
    that is returned has the placements of sampled tasks; ``options`` select them, and are refused if there is none.
    """
    moded = [
        in_mode(task, "sampled") if may_sample(task) and needs_sampling(task, estimator, room, options) else task
        for task in tasks
    ]
    moded = [with_fitting_batch(task, estimator, room, options) if task.batch == FIT else task for task in moded]
    return moded, with_placements(moded, estimator, room, options)


def with_fitting_batch(task: Task, estimator: Estimator, room: int, options: RunOptions = NONE) -> Task:
    """``task`` with the largest batch that fits: a power of two, at most the number of training nodes.

    Features and edges stay where the usual batch has them: more of a batch does not repay reading them over PCIe. If
    the usual batch fits nowhere, the largest that does is taken, and a batch of one if none does.
    """
    last = max(estimator.stats(task).num_train, 1).bit_length() - 1
    usual = min(USUAL_BATCH.bit_length() - 1, last)

    def tier(power: int) -> tuple[str, str] | None:
        try:
            placement, fits = place_one(task.with_values(batch=1 << power), estimator, room, options)
        except WeftError as error:
            if task.traits is not None:
                raise
            raise SpecError(f"{error}; batch='fit' needs that prediction: give a number, or mend it") from None
        return (placement.features, placement.topology) if fits else None

    at_usual = tier(usual)
    low, high = (0, usual - 1) if at_usual is None else (usual, last)
    while low < high:
        middle = (low + high + 1) // 2
        now = tier(middle)
        low, high = (middle, high) if now is not None and at_usual in (None, now) else (low, middle - 1)
    return task.with_values(batch=1 << low)


def needs_sampling(task: Task, estimator: Estimator, room: int, options: RunOptions = NONE) -> bool:
    """Whether ``task`` does not fit into ``room`` on the whole graph, and does in batches."""
    limits = GroupLimits(estimator.stats(task), estimator.machine.device, estimator.machine, budget=room)
    if limits.surely_fits([task]):  # by several times, so that no dry run is needed to know
        return False
    try:
        if estimator.alone(task).cost.total_bytes <= room:
            return False
        return place_one(in_mode(task, "sampled"), estimator, room, options)[1]
    except WeftError:
        if options.placement.given:  # what is wrong with them
            raise
        return False


def with_reason(plan: Plan, tasks: Mapping[str, Task], room: int) -> Plan:
    """``plan``, which says if ``room`` bytes decided that its members are sampled, or their batch.

    ``tasks``: as they were given, by name.
    """
    if plan.mode != "sampled":
        return plan
    if any(tasks[name].batch == FIT for name in plan.members) and plan.cost.get("total_bytes", 0) <= room:
        words = f"batch='fit': {plan.batch:,} is the largest power of two, up to all training nodes, that fits into"
        return replace(plan, why=(*plan.why, f"{words} {show_bytes(room)} with features and edges where they are"))
    if any(tasks[name].sampled for name in plan.members):
        return plan
    reason = f"the whole graph does not fit into {show_bytes(room)}"
    return replace(plan, why=tuple(why.replace(MODE_IS_SET, reason) for why in plan.why))


def in_mode(task: Task, mode: str, batch: int | None = None) -> Task:
    """``task`` with what a plan decided that it leaves open: its mode, and its batch."""
    task = task.with_values(mode="sampled") if mode == "sampled" and not task.sampled else task
    return task.with_values(batch=batch) if task.batch == FIT and batch is not None else task
