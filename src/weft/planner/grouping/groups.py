"""Decide which tasks of a sweep train together, and how: stacked, padded, woven or alone, with a reason per choice.

1. Tasks share a group only if they share the graph and its treatment (features, precision, objective, metric).
2. Equal structures are one stack. Structures equal except for widths are one stack, padded with zeros, where the
   waste costs less than the launches it saves.
3. A stack is cut where its throughput peaks (by rule) and where memory ends.
4. On a GPU, stacks that do not fill it train concurrently (or, on request, are woven into one step, the most
   similar first), within the same limits.

A group of one goes through the same steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.core.compatibility import GROUP_KEY_NAMES, group_key
from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import FILLS_DEVICE, Plan
from weft.core.task import Task
from weft.planner.grouping import step_options as step
from weft.planner.grouping.limits import Limits, MemoryOf, Size, size_in_words
from weft.planner.grouping.stacks import StackDraft, by_structure, padded, padding_reason, stack_draft, stacks_of
from weft.planner.placement import stages_of, why_this_mode

# ---- Similarity of two training steps: the share of their operators that can be matched, in [0, 1], and in words.
#
# Weaving pays by running matched operators as one; so the measure counts operators by kind and how many of them could
# be matched, and how near their widths and depths are. It reads the settings of a named model.

MATCHED, WIDTH, DEPTH = 0.7, 0.15, 0.15  # weights of the three parts

AROUND = {"loss": 2, "update": 1}


@dataclass(frozen=True)
class Features:
    """A step in three numbers that can be explained: operators by kind, the widest hidden row, graph layers."""

    operators: Mapping[str, int]
    width: int
    depth: int


def features_of_task(task: Task, stats: GraphStats) -> Features | None:
    """Counted from the settings of a named model; None for a user's model, which must be captured first."""
    if task.traits is None:
        return None
    layer = Counter(task.traits.operators)
    if "aggregator" in task.traits.shaping and task.aggregator == "max":
        layer = Counter({"spmm_max" if kind == "spmm" else kind: count for kind, count in layer.items()})
    if task.norm is not None:
        layer["norm"] += 2
    if task.residual:
        layer["matmul"] += 3
    total = Counter({kind: count * task.layers for kind, count in layer.items()}) + Counter(AROUND)
    return Features(dict(total), task.hidden if task.layers > 1 else max(stats.num_classes, 1), task.layers)


def similarity(one: Features, other: Features) -> tuple[float, str]:
    """A number in [0, 1], symmetric, 1 for equals; and where it comes from, in words."""
    kinds = set(one.operators) | set(other.operators)
    pairs = [(one.operators.get(kind, 0), other.operators.get(kind, 0)) for kind in kinds]
    shared, most = sum(min(pair) for pair in pairs), sum(max(pair) for pair in pairs)
    parts = shared / most if most else 1.0, _ratio(one.width, other.width), _ratio(one.depth, other.depth)
    score = MATCHED * parts[0] + WIDTH * parts[1] + DEPTH * parts[2]
    words = (
        f"{shared} of {most} operators can be matched, widths {one.width} and {other.width}, "
        f"{one.depth} and {other.depth} layers"
    )
    return score, words


def _ratio(one: int, other: int) -> float:
    return min(one, other) / max(one, other) if max(one, other) else 1.0


# ---- Decide which stacks share a device: concurrent on streams, woven into one step, or in turn, and why.

ALIKE = 0.4  # similarity from which on stacks may be woven


def shared_groups(bundles: list[StackDraft], limits: Limits) -> list[tuple[list[StackDraft], list[str]]]:
    """Put bundles into groups, largest load first, each into the first (for weaving: most similar) that it fits."""
    if len(bundles) == 1:
        return [(bundles, [])]
    if not (limits.device == "cuda" if limits.weave is None else limits.weave):
        where = "on a CPU one operator runs at a time" if limits.device == "cpu" else "weave=False"
        return [([bundle], [f"stacks one after another: {where}"]) for bundle in bundles]
    groups: list[tuple[list[StackDraft], list[str]]] = []
    features = (
        {id(bundle): features_of_task(bundle.tasks[0], limits.stats) for bundle in bundles} if limits.weave else {}
    )
    for bundle in sorted(bundles, key=lambda b: (-b.load, b.places[0])):
        if limits.weave:
            _place_woven(bundle, groups, features, limits)
        else:
            _place_beside(bundle, groups, limits)
    for joined, _ in groups:
        joined.sort(key=lambda b: b.places[0])
    return groups


def _place_beside(bundle: StackDraft, groups: list[tuple[list[StackDraft], list[str]]], limits: Limits) -> None:
    alone = _trains_alone(bundle, limits)
    if alone is not None:
        groups.append(([bundle], [alone]))
        return
    refused: list[str] = []
    for joined, why in groups:
        if _trains_alone(joined[0], limits):
            continue
        obstacle = _no_room(bundle, joined, limits, "concurrent with")
        if obstacle is None:
            why.append(f"{_called(bundle)} concurrent with {_called(joined[0])}: neither fills the device")
            joined.append(bundle)
            return
        refused.append(obstacle)
    groups.append(([bundle], refused[:1]))


def _trains_alone(bundle: StackDraft, limits: Limits) -> str | None:
    """Why no other stack may train concurrently with this one, whatever fits; None if one may."""
    if bundle.tasks[0].traits is None:
        return f"{bundle.tasks[0].model_name} in a group of its own: the load of its operators is not known"
    if limits.stats.num_edges >= FILLS_DEVICE:
        return (
            f"stacks one after another: every kernel over {limits.stats.num_edges:,} edges fills the device by itself"
        )
    return None


def _place_woven(
    bundle: StackDraft,
    groups: list[tuple[list[StackDraft], list[str]]],
    features: dict[int, Features | None],
    limits: Limits,
) -> None:
    own = features[id(bundle)]
    if own is None:
        name = bundle.tasks[0].model_name
        groups.append(([bundle], [f"{name} not woven: its operators are not known before it is captured"]))
        return
    refused: list[str] = []
    for score, words, joined, why in _candidates(own, groups, features):
        obstacle = _obstacle(score, words, bundle, joined, limits)
        if obstacle is None:
            why.append(f"{_called(bundle)} woven with {_called(joined[0])}: similarity {score:.2f} ({words})")
            joined.append(bundle)
            return
        refused.append(obstacle)
    groups.append(([bundle], refused[:1]))


def _candidates(
    own: Features, groups: list[tuple[list[StackDraft], list[str]]], features: dict[int, Features | None]
) -> list[tuple[float, str, list[StackDraft], list[str]]]:
    """Groups by similarity, most similar first; a group is as similar as its least similar stack."""
    found = []
    for joined, why in groups:
        others = [features[id(bundle)] for bundle in joined]
        scores = [similarity(own, other) for other in others if other is not None]
        if len(scores) == len(joined):
            found.append((*min(scores), joined, why))
    return sorted(found, key=lambda item: -item[0])


def _obstacle(score: float, words: str, bundle: StackDraft, joined: list[StackDraft], limits: Limits) -> str | None:
    """Why ``bundle`` is not woven into a group; None if it may."""
    if score < ALIKE:
        name, other = _called(bundle), _called(joined[0])
        return f"{name} not woven with {other}: similarity {score:.2f} is below {ALIKE} ({words})"
    return _no_room(bundle, joined, limits, "woven with")


def _no_room(bundle: StackDraft, joined: list[StackDraft], limits: Limits, how: str) -> str | None:
    """Why ``bundle`` does not fit into a group, by load or by memory; None if it does."""
    apart = f"{_called(bundle)} not {how} {_called(joined[0])}"
    load = bundle.load + sum(b.load for b in joined)
    if load > 1.0:
        return f"{apart}: together they would be {load:.1f} times what fills the device"
    together = [task for b in (*joined, bundle) for task in b.tasks]
    if not limits.fits(together):
        assert limits.room is not None
        return f"{apart}: together {size_in_words(limits.bytes(together))} of {size_in_words(limits.room)}"
    return None


def _called(bundle: StackDraft) -> str:
    task = bundle.tasks[0]
    depth = f" of {task.layers} layers" if task.traits is not None else ""
    return f"{task.model_name}{depth} x {len(bundle.tasks)}"


StatsOf = GraphStats | Callable[[Task], GraphStats]


def group(
    tasks: Iterable[Task],
    stats: StatsOf,
    device: str,
    machine: Machine | None = None,
    memory_of: MemoryOf | None = None,
    budget: float | None = None,
    *,
    weave: bool | None = None,
) -> list[Plan]:
    """Plans for groups that together hold every task once, in the order of their first members.

    ``stats``: of the one graph, or a function of the task. ``device``: ``"cpu"`` or ``"cuda"``. ``memory_of(tasks)``:
    peak bytes of a group (None: a rule of thumb). ``budget``:
    bytes that a group may take (None: 95 % of ``machine``'s, no limit without one). ``weave``: whether stacks of
    different structure are merged into one step; None: they train concurrently on a GPU, False: each is a group
    of its own.
    """
    listed = list(tasks)
    _check_names(listed)
    plans: list[tuple[int, Plan]] = []
    for places in _by_group_key(listed, stats):
        found = stats if isinstance(stats, GraphStats) else stats(listed[places[0]])
        limits = Limits(found, device, machine, memory_of, budget, weave)
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
