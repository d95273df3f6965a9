"""Choose where the features and edges of sampled tasks lie: the first placement that fits into the budget."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.core.compatibility import group_key
from weft.core.errors import SpecError
from weft.core.placement import check_place
from weft.core.plan import PlanOptions
from weft.core.task import Task
from weft.core.units import parse_bytes, show_bytes
from weft.engine.planning.estimator import NONE, Estimator
from weft.planner.sampling.places import CHUNKS, candidates, check_options


def place_options(
    features: str | None = None,
    topology: str | None = None,
    cache: str | float | None = None,
    cache_policy: object = None,
) -> dict[str, object]:
    """The options of where things lie, checked, by the names that :class:`PlanOptions` has for them."""
    for name, place in (("features", features), ("topology", topology)):
        if place is not None:
            check_place(name, place)
    if cache_policy is not None:
        from weft.runtime.batches.caches import policy_name

        policy_name(cache_policy)
    size = None if cache is None else parse_bytes(cache, "cache")
    found = {"features": features, "topology": topology, "cache": size, "cache_policy": cache_policy}
    check_options(PlanOptions(**found))  # type: ignore[arg-type]
    return found


def own_policy(options: PlanOptions) -> object | None:
    """The user's own cache policy, where one was given."""
    return None if isinstance(options.cache_policy, str) else options.cache_policy


def with_places(tasks: Sequence[Task], estimator: Estimator, room: int, options: PlanOptions = NONE) -> None:
    """Tell ``estimator`` where the things of sampled ``tasks`` lie; the least that was tried if nothing fits."""
    if options.places and not any(task.sampled for task in tasks):
        names = ("features", "topology", "cache", "cache_policy")
        name = next(name for name in names if getattr(options, name) is not None)
        raise SpecError(
            f"{name}={getattr(options, name)!r} would have no effect: task {tasks[0].label!r} trains on the whole "
            "graph, which lies on the device; mode='sampled' reads it batch by batch"
        )
    sharing: dict[Hashable, list[Task]] = {}
    for task in tasks:
        if task.sampled:
            sharing.setdefault(group_key(task, estimator.stats(task).multilabel), []).append(task)
    for alike in sharing.values():
        if place_one(alike[0], estimator, room, options):
            evaluate_by_layers(alike[0], len(alike), estimator, room - (options.cache or 0))


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


def place_one(task: Task, estimator: Estimator, room: int, options: PlanOptions = NONE) -> bool:
    """Place the things of ``task`` and of those that share its batches; whether it then fits."""
    cache, needed = options.cache or 0, 0
    if cache > room:
        raise SpecError(f"cache={show_bytes(cache)} is larger than the budget of {show_bytes(room)}")
    for placement in candidates(task, estimator.stats(task), estimator.machine, options):
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
