"""Decide which tasks of a sweep train together, and how: stacked, padded, woven or alone, with a reason per choice.

1. Tasks share a group only if they share the graph and its treatment (features, precision, objective, metric).
2. Equal structures are one stack. Structures equal except for widths are one stack, padded with zeros, where the
   waste costs less than the launches it saves.
3. A stack is cut where its throughput peaks (measured, else by rule) and where memory ends.
4. On a GPU, stacks that do not fill it train concurrently (or, on request, are woven into one step, the most
   similar first), within the same limits.

A group of one goes through the same steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from weft.core.compatibility import GROUP_KEY_NAMES, group_key
from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.task import Task
from weft.planner.grouping import step_options as step
from weft.planner.grouping.limits import Limits, MemoryOf, size_in_words
from weft.planner.grouping.sharing import shared_groups
from weft.planner.grouping.stack_size import Size
from weft.planner.grouping.stack_size_table import Throughput
from weft.planner.grouping.stacks import StackDraft, by_structure, padded, padding_reason, stack_draft, stacks_of
from weft.planner.training_mode import stages_of, why_this_mode

StatsOf = GraphStats | Callable[[Task], GraphStats]


def group(
    tasks: Iterable[Task],
    stats: StatsOf,
    device: str,
    machine: Machine | None = None,
    memory_of: MemoryOf | None = None,
    throughput: Throughput | None = None,
    budget: float | None = None,
    *,
    weave: bool | None = None,
) -> list[Plan]:
    """Plans for groups that together hold every task once, in the order of their first members.

    ``stats``: of the one graph, or a function of the task. ``device``: ``"cpu"`` or ``"cuda"``. ``memory_of(tasks)``:
    peak bytes of a group (None: a rule of thumb). ``throughput``: what was measured on this machine. ``budget``:
    bytes that a group may take (None: 95 % of ``machine``'s, no limit without one). ``weave``: whether stacks of
    different structure are merged into one step; None: they train concurrently on a GPU, False: each is a group
    of its own.
    """
    listed = list(tasks)
    _check_names(listed)
    plans: list[tuple[int, Plan]] = []
    for places in _by_group_key(listed, stats):
        found = stats if isinstance(stats, GraphStats) else stats(listed[places[0]])
        limits = Limits(found, device, machine, memory_of, throughput, budget, weave)
        many = len(listed) > 1
        plans += [(members[0], plan) for members, plan in _plans(listed, places, limits, many)]
    return [plan for _, plan in sorted(plans, key=lambda pair: pair[0])]


def plan_as_one_group(
    tasks: Iterable[Task], stats: GraphStats, device: str, machine: Machine | None = None, *, weave: bool = True
) -> Plan:
    """One plan for all ``tasks`` as one group, whatever their number and similarity: if that is required.

    Stacks of different structure are woven, or without ``weave`` train concurrently.
    """
    listed = list(tasks)
    _check_names(listed)
    if len(_by_group_key(listed, stats)) > 1:
        raise SpecError("tasks that share a step must agree in " + ", ".join(GROUP_KEY_NAMES))
    limits = Limits(stats, device, machine, weave=weave)
    places = list(range(len(listed)))
    bundles = []
    for alike in by_structure(listed, places):
        for inside, why in padded(listed, alike, limits):
            reasons = [*why, *padding_reason([listed[place] for place in inside], limits)]
            bundles.append(stack_draft(listed, inside, Size(len(inside), ""), reasons))
    return _plan(listed, places, bundles, [], limits)


def _check_names(tasks: Sequence[Task]) -> None:
    counts = Counter(task.label for task in tasks)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise SpecError(
            f"{counts[twice[0]]} tasks are called {twice[0]!r}; give each a name of its own: "
            f"name={twice[0] + '-1'!r}, name={twice[0] + '-2'!r}"
        )


def _by_group_key(tasks: Sequence[Task], stats: StatsOf) -> list[list[int]]:
    found: dict[tuple[object, ...], list[int]] = {}
    for place, task in enumerate(tasks):
        found_stats = stats if isinstance(stats, GraphStats) else stats(task)
        key = group_key(task, found_stats.multilabel)
        found.setdefault(key, []).append(place)
    return list(found.values())


def _plans(tasks: list[Task], places: list[int], limits: Limits, many: bool) -> list[tuple[list[int], Plan]]:
    bundles = [bundle for alike in by_structure(tasks, places) for bundle in stacks_of(tasks, alike, limits)]
    result = []
    for joined, why in shared_groups(bundles, limits):
        members = sorted(place for bundle in joined for place in bundle.places)
        result.append((members, _plan(tasks, members, joined, why if many else [], limits)))
    return result


def _plan(tasks: list[Task], members: list[int], joined: list[StackDraft], why: list[str], limits: Limits) -> Plan:
    own = [tasks[place] for place in members]
    once, first_reason = step.first_layer(own, limits.stats)
    replay, replay_reason = step.replay(own, limits.device)
    clustered, rows_reason = step.row_order(own, limits.stats, limits.device, limits.machine)
    threads, threads_reason = step.threads(own, limits.stats, limits.device)
    slot = {place: slot for slot, place in enumerate(members)}
    stacks = tuple(tuple(sorted(slot[place] for place in bundle.places)) for bundle in joined)
    reasons = [reason for bundle in joined for reason in bundle.why]
    general = (first_reason, replay_reason, *rows_reason, step.features_reason(own, limits.stats), *threads_reason)
    if own[0].sampled:
        once, clustered = False, False
        general = (why_this_mode(own[0], limits.stats), replay_reason, *threads_reason)
    return Plan(
        members=tuple(task.label for task in own),
        join=("woven" if limits.weave else "concurrent") if len(joined) > 1 else "stacked" if len(own) > 1 else "solo",
        device=limits.device,
        replay=replay,
        first_layer="once" if once else "per_step",
        row_order="clustered" if clustered else "by_length",
        threads=threads,
        why=tuple(dict.fromkeys((*why, *reasons, *_too_large(own, limits), *general))),
        stacks=stacks if len(stacks) > 1 else (),
        mode="sampled" if own[0].sampled else "full",
        stages=stages_of(own[0], limits.device),
    )


def _too_large(tasks: list[Task], limits: Limits) -> list[str]:
    if len(tasks) > 1 or limits.room is None or limits.fits(tasks):
        return []
    return [f"it does not fit even alone: {size_in_words(limits.bytes(tasks))} of {size_in_words(limits.room)}"]
