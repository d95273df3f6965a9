"""Decide which tasks of a sweep train together, and how: stacked, padded, woven or alone, with a reason per choice.

1. Tasks share a group only if they share the graph and its treatment (features, precision, objective, metric).
2. Equal structures are one stack. Structures equal except for widths are one stack, padded with zeros, where the
   waste costs less than the launches it saves.
3. A stack is cut where its throughput peaks (by rule) and where memory ends.
4. On a GPU, stacks that do not fill it train concurrently (or, on request, are woven into one step, the most
   similar first), within the same limits. Sampled stacks share their batches, on any device.

A group of one goes through the same steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core.compatibility import GROUP_KEY_NAMES, group_key
from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import FILLS_DEVICE, Plan
from weft.core.run_options import MAX_MEMBERS
from weft.core.task import FIT, Task
from weft.core.wording import option
from weft.planner.grouping import step_options as step
from weft.planner.grouping.limits import GroupLimits, MemoryOf, Size, fitting_size, size_in_words
from weft.planner.grouping.stacks import StackDraft, by_structure, cut_stacks, padded, padding_reason
from weft.planner.placement import stages_of, why_this_mode

# Weaving pays by running matched operators as one; so similarity counts operators by kind and how many of them could be
# matched, and how near their widths and depths are. It reads the settings of a named model.
MATCHED, WIDTH, DEPTH = 0.7, 0.15, 0.15  # weights of the three parts
OUTSIDE_LAYERS = {"loss": 2, "update": 1}
ALIKE = 0.4  # similarity from which on stacks may be woven


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
    total = Counter({kind: count * task.layers for kind, count in layer.items()}) + Counter(OUTSIDE_LAYERS)
    return Features(dict(total), task.hidden if task.layers > 1 else max(stats.num_classes, 1), task.layers)


def similarity(first: Features, second: Features) -> tuple[float, str]:
    """A number in [0, 1], symmetric, 1 for equals; and where it comes from, in words."""
    kinds = set(first.operators) | set(second.operators)
    pairs = [(first.operators.get(kind, 0), second.operators.get(kind, 0)) for kind in kinds]
    shared, most = sum(min(pair) for pair in pairs), sum(max(pair) for pair in pairs)
    sizes = (shared, most), (first.width, second.width), (first.depth, second.depth)
    ratios = [min(pair) / max(pair) if max(pair) else 1.0 for pair in sizes]
    score = MATCHED * ratios[0] + WIDTH * ratios[1] + DEPTH * ratios[2]
    words = (
        f"{shared} of {most} operators can be matched, widths {first.width} and {second.width}, "
        f"{first.depth} and {second.depth} layers"
    )
    return score, words


Shared = list[tuple[list[StackDraft], list[str]]]  # groups of stacks with their reasons


def shared_groups(bundles: list[StackDraft], limits: GroupLimits) -> Shared:
    """Put bundles into groups, largest load first, each into the first (for weaving: most similar) that it fits.

    Sampled stacks share every batch, which is sampled and fetched once, and train on it in turn, however large the
    graph is: a batch has 853,819 edges where the products shape has 123,718,280.
    """
    sampled = bundles[0].tasks[0].sampled
    if limits.weave == "merged+push" and limits.stats.symmetric:
        raise SpecError(
            f"{option('weave', limits.weave)} would have no effect: graph {limits.stats.name!r} is symmetric, so that "
            f"backward sums run over the structure of forward ones; give {option('weave', 'merged')}"
        )
    if len(bundles) == 1:
        return [(bundles, [])]
    if not _stacks_share(limits, sampled):
        where = option("weave", "off") if limits.weave else "on a CPU one operator runs at a time"
        return [([bundle], [f"stacks one after another: {where}"]) for bundle in bundles]
    # Merging is for those who ask for it: about 26 kernels are compiled for 5 to 29 s, the stacks' own numbers are
    # equal only up to rounding, and little is gained over streams (H200, benchmarks/results/settings.json: four GCNs of
    # 2 to 4 layers on the pubmed shape 0.496 ms per epoch woven, 0.426 concurrent; six tasks on demo 0.295, 0.370).
    merges = limits.merges and not sampled
    how = "sharing batches with" if sampled else "woven with" if merges else "concurrent with"
    groups: Shared = []
    for bundle in sorted(bundles, key=lambda b: (-b.load, b.positions[0])):
        alone = _trains_alone(bundle, limits)
        refused = [] if alone is None else [alone]
        for joined, why, score, words in _candidates(bundle, groups, limits) if alone is None else ():
            names = _name(bundle), _name(joined[0])
            load = sum(each.load for each in (*joined, bundle))
            tasks = [task for each in (*joined, bundle) for task in each.tasks]
            obstacle = f"similarity {score:.2f} is below {ALIKE} ({words})" if score < ALIKE else None
            if obstacle is None and load > 1.0 and not sampled:
                obstacle = f"together they would be {load:.1f} times what fills the device"
            if obstacle is None and len(tasks) > MAX_MEMBERS:
                obstacle = f"no group has more than {MAX_MEMBERS} members"
            if obstacle is None and limits.room is not None and not limits.fits(tasks):
                obstacle = f"together {size_in_words(limits.bytes(tasks))} of {size_in_words(limits.room)}"
            if obstacle is None:
                reason = "sampled and fetched once" if sampled else "neither fills the device"
                if merges:
                    reason = f"similarity {score:.2f} ({words})"
                elif limits.weave == "concurrent":
                    reason = option("weave", limits.weave)
                why.append(f"{names[0]} {how} {names[1]}: {reason}")
                joined.append(bundle)
                break
            refused.append(f"{names[0]} not {how} {names[1]}: {obstacle}")
        else:
            groups.append(([bundle], refused[:1]))
    for joined, why in groups:
        if len(joined) > 1 and limits.weave is None and not sampled:
            why.append(f"not merged: kernels would be compiled for 5 to 29 s; {option('weave', 'merged')} does it")
        joined.sort(key=lambda b: b.positions[0])
    return groups


def _stacks_share(limits: GroupLimits, sampled: bool) -> bool:
    """Whether stacks of different structure share a group: sampled batches, a GPU's time, or a merged step."""
    return limits.weave != "off" and (limits.device == "cuda" or limits.merges or sampled)


def may_share(task: Task, limits: GroupLimits) -> bool:
    """Whether tasks of other structure may share a group with ``task``."""
    alone = _trains_alone(StackDraft([task], [0], Size(1, "")), limits)
    return _stacks_share(limits, task.sampled) and alone is None


def _trains_alone(bundle: StackDraft, limits: GroupLimits) -> str | None:
    """Why no other stack may share the step of this one, or the device with it; None if one may."""
    first = bundle.tasks[0]
    if first.traits is None and limits.merges:
        return f"{first.model_name} not woven: its operators are not known before it is captured"
    if first.traits is None:
        return f"{first.model_name} in a group of its own: the load of its operators is not known"
    if limits.stats.num_edges >= FILLS_DEVICE and limits.weave is None and not first.sampled:
        edges = f"{limits.stats.num_edges:,}"
        return f"stacks one after another: every kernel over {edges} edges fills the device by itself"
    return None


def _candidates(
    bundle: StackDraft, groups: Shared, limits: GroupLimits
) -> list[tuple[list[StackDraft], list[str], float, str]]:
    """Groups that ``bundle`` may join, for weaving the most similar first, by their least similar stack."""
    candidates = []
    for joined, why in groups:
        if _trains_alone(joined[0], limits) is None:
            score, words = 1.0, ""
            if limits.merges and not bundle.tasks[0].sampled:
                features = [features_of_task(b.tasks[0], limits.stats) for b in (bundle, *joined)]
                score, words = min(similarity(features[0], f) for f in features[1:] if features[0] and f)
            candidates.append((joined, why, score, words))
    return sorted(candidates, key=lambda candidate: -candidate[2])


def _name(bundle: StackDraft) -> str:
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
    weave: str | None = None,
) -> list[Plan]:
    """Plans for groups that together hold every task once, in the order of their first members.

    ``stats``: of the one graph, or a function of the task. ``device``: ``"cpu"`` or ``"cuda"``. ``memory_of(tasks)``:
    peak bytes of a group (None: a rule of thumb). ``budget``: bytes that a group may take (None: 95 % of
    ``machine``'s, no limit without one). ``weave``: how stacks of different structure share the device, one of
    :data:`weft.core.run_options.WEAVES`; None: concurrently on a GPU that they do not fill.
    """
    listed = list(tasks)
    _check_names(listed)
    plans: list[tuple[int, Plan]] = []
    for positions in _by_group_key(listed, stats):
        graph = stats if isinstance(stats, GraphStats) else stats(listed[positions[0]])
        limits = GroupLimits(graph, device, machine, memory_of, budget, weave)
        padding = (run for alike in by_structure(listed, positions) for run in padded(listed, alike, limits))
        bundles = [bundle for inside, why in padding for bundle in cut_stacks(listed, inside, why, limits)]
        for joined, why in shared_groups(bundles, limits):
            members = sorted(position for bundle in joined for position in bundle.positions)
            plans.append((members[0], _plan(listed, members, joined, why if len(listed) > 1 else [], limits)))
    return [plan for _, plan in sorted(plans, key=lambda pair: pair[0])]


def plan_as_one_group(
    tasks: Iterable[Task], stats: GraphStats, device: str, machine: Machine | None = None, *, weave: str | None = None
) -> Plan:
    """One plan for all ``tasks`` as one group, whatever their number and similarity: if that is required.

    Stacks of different structure train concurrently, unless ``weave`` merges them.
    """
    listed = list(tasks)
    _check_names(listed)
    if len(_by_group_key(listed, stats)) > 1:
        raise SpecError("tasks that share a step must agree in " + ", ".join(GROUP_KEY_NAMES))
    limits = GroupLimits(stats, device, machine, weave=weave)
    return _plan(listed, list(range(len(listed))), _whole_stacks(listed, limits), [], limits)


def plan_with_first(
    tasks: Sequence[Task], stats: GraphStats, device: str, machine: Machine | None = None, *, weave: str | None = None
) -> Plan:
    """One plan for the first of ``tasks`` and those of the others that share its group; stacks are not cut.

    The other tasks are left out: a queue starts them later.
    """
    listed = list(tasks)
    _check_names(listed)
    if len(by_structure(listed, list(range(len(listed))))) == 1:
        return plan_as_one_group(listed, stats, device, machine)
    limits = GroupLimits(stats, device, machine, weave=weave)
    stacks = [replace(stack, size=fitting_size(stack.tasks[0], limits)) for stack in _whole_stacks(listed, limits)]
    groups = shared_groups(stacks, limits)
    joined, why = next(group for group in groups if any(0 in stack.positions for stack in group[0]))
    members = sorted(position for stack in joined for position in stack.positions)
    return _plan(listed, members, joined, why, limits)


def _whole_stacks(tasks: list[Task], limits: GroupLimits) -> list[StackDraft]:
    """A stack for every structure, or for widths of it that are not padded to one; none is cut."""
    stacks = []
    for alike in by_structure(tasks, list(range(len(tasks)))):
        for inside, why in padded(tasks, alike, limits):
            members = [tasks[position] for position in inside]
            reasons = [*why, *padding_reason(members, limits)]
            stacks.append(StackDraft(members, inside, Size(len(inside), ""), reasons))
    return stacks


def _check_names(tasks: Sequence[Task]) -> None:
    counts = Counter(task.label for task in tasks)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise SpecError(
            f"{counts[twice[0]]} tasks are called {twice[0]!r}; give each a name of its own: "
            f"name={twice[0] + '-1'!r}, name={twice[0] + '-2'!r}"
        )


def _by_group_key(tasks: Sequence[Task], stats: StatsOf) -> list[list[int]]:
    positions: dict[tuple[object, ...], list[int]] = {}
    for position, task in enumerate(tasks):
        graph = stats if isinstance(stats, GraphStats) else stats(task)
        positions.setdefault(group_key(task, graph.multilabel), []).append(position)
    return list(positions.values())


def _plan(tasks: list[Task], members: list[int], joined: list[StackDraft], why: list[str], limits: GroupLimits) -> Plan:
    group_tasks = [tasks[position] for position in members]
    first = group_tasks[0]
    once, first_reason = step.first_layer(group_tasks, limits.stats)
    replay, replay_reason = step.replay(group_tasks, limits.device)
    clustered, rows_reason = step.row_order(group_tasks, limits.stats, limits.device, limits.machine)
    threads, threads_reason = step.threads(group_tasks, limits.stats, limits.device)
    features_reason = step.features_reason(group_tasks, limits.stats)
    general = (first_reason, replay_reason, *rows_reason, features_reason, *threads_reason)
    if first.sampled:
        once, clustered = False, False
        general = (why_this_mode(first, limits.stats), replay_reason, *threads_reason)
    too_large = []
    if len(group_tasks) == 1 and limits.room is not None and not limits.fits(group_tasks):
        sizes = f"{size_in_words(limits.bytes(group_tasks))} of {size_in_words(limits.room)}"
        too_large = [f"it does not fit even alone: {sizes}"]
    slot = {position: slot for slot, position in enumerate(members)}
    stacks = tuple(tuple(sorted(slot[position] for position in bundle.positions)) for bundle in joined)
    reasons = [reason for bundle in joined for reason in bundle.why]
    together = {"merged": "woven", "merged+push": "woven+push"}.get(limits.weave or "", "concurrent")
    if first.sampled:
        together = "in turn"  # on every batch, which they share
    return Plan(
        members=tuple(task.label for task in group_tasks),
        join=together if len(joined) > 1 else "stacked" if len(group_tasks) > 1 else "solo",
        device=limits.device,
        replay=replay,
        first_layer="once" if once else "per_step",
        row_order="clustered" if clustered else "by_length",
        threads=threads,
        why=tuple(dict.fromkeys((*why, *reasons, *too_large, *general))),
        stacks=stacks if len(stacks) > 1 else (),
        mode="sampled" if first.sampled else "full",
        batch=first.batch if first.sampled and first.batch != FIT else None,
        stages=stages_of(first, limits.device),
    )
