"""Which tasks of a sweep train together, and how: stacked, padded, woven or alone, with a reason for each choice.

1. Tasks share a group only if they share the graph and its treatment (features, precision, objective, metric).
2. Equal structures are one stack. Structures equal but for widths are one stack, padded with zeros, where the
   waste costs less than the launches it saves.
3. A stack is cut where its throughput peaks (measured, else by rule) and where memory ends.
4. On a GPU, stacks that do not fill it train beside each other (or, where asked for, are woven into one step, the most
   similar first), within the same limits.

A group of one goes through the same steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import FILLS_DEVICE, Plan
from weft.core.task import MODELS, Task
from weft.planner.cost.rule_of_thumb import Rates, attention_bytes, memory, rates_of, work
from weft.planner.grouping import step_options as step
from weft.planner.grouping.compatibility import GROUP_KEY_NAMES, group_key, padding_obstacle, structure, width
from weft.planner.grouping.similarity import Features, features_of_task, similarity
from weft.planner.grouping.stack_size import Size, fitting_size
from weft.planner.grouping.stack_size_table import Throughput
from weft.planner.grouping.width_runs import cut_widths, waste

ALIKE = 0.4  # similarity from which on stacks may be woven
SURELY = 4.0  # times the rule of thumb for memory: with what heads take on top, no known model takes more
MAX_LISTED = 8  # widths in a sentence
USABLE = 0.95  # of the memory that a machine offers, where no budget is given

MemoryOf = Callable[[Sequence[Task]], float]
StatsOf = GraphStats | Callable[[Task], GraphStats]


@dataclass(frozen=True)
class Limits:
    """What groups have to keep to: the device and its rates, bytes, and what was measured before."""

    stats: GraphStats
    device: str
    machine: Machine | None = None
    memory_of: MemoryOf | None = None
    throughput: Throughput | None = None
    budget: float | None = None
    weave: bool | None = None

    def rates(self, task: Task) -> Rates:
        """The rates of the device for the precision of ``task``."""
        return rates_of(self.device, self.machine, task.precision)

    def bytes(self, tasks: Sequence[Task]) -> float:
        """Bytes of a group of ``tasks``: the engine's estimate, or a rule of thumb."""
        return self.memory_of(tasks) if self.memory_of is not None else memory(list(tasks), self.stats, self.device)

    @property
    def room(self) -> float | None:
        """Bytes that a group may take; None: nobody set a limit."""
        if self.budget is not None or self.machine is None:
            return self.budget
        return USABLE * self.machine.available_bytes

    def fits(self, tasks: Sequence[Task]) -> bool:
        """Whether a group of ``tasks`` keeps within the room there is."""
        return self.room is None or self._surely_fits(tasks) or self.bytes(tasks) <= self.room

    def _surely_fits(self, tasks: Sequence[Task]) -> bool:
        """Whether there is room for several times what the rule of thumb says, so that nothing has to be captured."""
        assert self.room is not None
        known = all(task.model in MODELS for task in tasks)
        most = SURELY * memory(list(tasks), self.stats, self.device) + attention_bytes(list(tasks), self.stats)
        return known and most <= self.room


@dataclass
class StackDraft:
    """Tasks that will be one stack: ``places`` in the list that came in, and why it is as it is."""

    tasks: list[Task]
    places: list[int]
    size: Size
    why: list[str] = field(default_factory=list)

    @property
    def load(self) -> float:
        """The share of the device that the stack fills."""
        return self.size.full * len(self.tasks) / self.size.tasks


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
    different structure are merged into one step; None: they train beside each other on a GPU, False: each is a group
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
    """One plan for all ``tasks`` as one group, whatever their number and similarity: for those who insist.

    Stacks of different structure are woven, or without ``weave`` train beside each other.
    """
    listed = list(tasks)
    _check_names(listed)
    if len(_by_group_key(listed, stats)) > 1:
        raise SpecError("tasks that share a step must agree in " + ", ".join(GROUP_KEY_NAMES))
    limits = Limits(stats, device, machine, weave=weave)
    places = list(range(len(listed)))
    bundles = []
    for alike in _by_structure(listed, places):
        for inside, why in _padded(listed, alike, limits):
            reasons = [*why, *_padding_reason([listed[place] for place in inside], limits)]
            bundles.append(_bundle(listed, inside, Size(len(inside), ""), reasons))
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
        key = group_key(task, stats if isinstance(stats, GraphStats) else stats(task))
        found.setdefault(key, []).append(place)
    return list(found.values())


def _plans(tasks: list[Task], places: list[int], limits: Limits, many: bool) -> list[tuple[list[int], Plan]]:
    bundles = [bundle for alike in _by_structure(tasks, places) for bundle in _stacks(tasks, alike, limits)]
    result = []
    for joined, why in _sharing(bundles, limits):
        members = sorted(place for bundle in joined for place in bundle.places)
        result.append((members, _plan(tasks, members, joined, why if many else [], limits)))
    return result


def _plan(tasks: list[Task], members: list[int], joined: list[StackDraft], why: list[str], limits: Limits) -> Plan:
    own = [tasks[place] for place in members]
    once, first_reason = step.first_layer(own, limits.stats)
    replay, replay_reason = step.replay(limits.device)
    clustered, rows_reason = step.row_order(own, limits.stats, limits.device, limits.machine)
    threads, threads_reason = step.threads(own, limits.stats, limits.device)
    slot = {place: slot for slot, place in enumerate(members)}
    stacks = tuple(tuple(sorted(slot[place] for place in bundle.places)) for bundle in joined)
    reasons = [reason for bundle in joined for reason in bundle.why]
    general = (first_reason, replay_reason, *rows_reason, step.features_reason(limits.stats), *threads_reason)
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
    )


def _too_large(tasks: list[Task], limits: Limits) -> list[str]:
    if len(tasks) > 1 or limits.room is None or limits.fits(tasks):
        return []
    return [f"it does not fit: {_size(limits.bytes(tasks))} of {_size(limits.room)}, alone as it is"]


# ---- stacks ------------------------------------------------------------------------------------------


def _by_structure(tasks: list[Task], places: list[int]) -> list[list[int]]:
    found: dict[tuple[object, ...], list[int]] = {}
    for place in places:
        found.setdefault(tuple(structure(tasks[place]).items()), []).append(place)
    return list(found.values())


def _stacks(tasks: list[Task], places: list[int], limits: Limits) -> list[StackDraft]:
    """The stacks of tasks with one structure: widths padded or apart, then cut to size, each with its reasons."""
    return [b for inside, why in _padded(tasks, places, limits) for b in _cut(tasks, inside, why, limits)]


def _padded(tasks: list[Task], places: list[int], limits: Limits) -> list[tuple[list[int], list[str]]]:
    """Tasks of one structure by the widths that share a stack, with the reason."""
    counts = Counter(width(tasks[place]) for place in places)
    sample = tasks[places[0]]
    runs, why = _runs(sample, counts, limits)
    result = []
    for run in runs:
        inside = [place for place in places if width(tasks[place]) in run]
        result.append((inside, why))
    return result


def _bundle(tasks: list[Task], places: list[int], size: Size, why: list[str]) -> StackDraft:
    chosen = sorted(places)
    return StackDraft([tasks[place] for place in chosen], chosen, size, list(why))


def _runs(sample: Task, counts: Counter[int], limits: Limits) -> tuple[list[list[int]], list[str]]:
    if len(counts) == 1:
        return [list(counts)], []
    obstacle = padding_obstacle(sample)
    if obstacle is not None:
        return [[width] for width in sorted(counts)], [f"widths {_listed(counts)} apart: {obstacle}"]
    cost = _cost(sample, limits)
    runs = cut_widths(counts, cost, _overhead(sample, limits))
    if len(runs) == 1:
        return runs, []
    lost = waste(counts, cost)
    return runs, [f"widths {_listed(counts)} not all padded to {max(counts)}: {lost:.0%} of the work would be zeros"]


def _cost(sample: Task, limits: Limits) -> Callable[[int], float]:
    rates = limits.rates(sample)
    return lambda hidden: work(sample, limits.stats, hidden).seconds(rates)


def _overhead(sample: Task, limits: Limits) -> float:
    return work(sample, limits.stats).launches * limits.rates(sample).launch


def _padding_reason(tasks: list[Task], limits: Limits) -> list[str]:
    counts, sample = Counter(width(task) for task in tasks), tasks[0]
    if len(counts) < 2:
        return []
    cost = _cost(sample, limits)
    extra = sum(counts.values()) * cost(max(counts)) * waste(counts, cost)
    saved = (len(counts) - 1) * _overhead(sample, limits)
    more = "1 more stack" if len(counts) == 2 else f"{len(counts) - 1} more stacks"
    return [
        f"widths {_listed(counts)} padded with zeros to {max(counts)}: {waste(counts, cost):.0%} of the work is zeros, "
        f"about {extra * 1e6:,.0f} us an epoch against {saved * 1e6:,.0f} us for the launches of {more}"
    ]


def _cut(tasks: list[Task], places: list[int], why: list[str], limits: Limits) -> list[StackDraft]:
    """One stack, or as many equal ones as its limits ask for; wide tasks stay together, so that less is padded."""
    order = sorted(places, key=lambda place: (-width(tasks[place]), place))
    sample = tasks[order[0]]
    size = fitting_size(sample, limits.stats, limits.device, limits.rates(sample), limits.throughput)
    most, memory_reason = _most_that_fit([tasks[place] for place in order], limits)
    least = min(size.tasks, most)
    cut = []
    if len(order) > least:
        cause = memory_reason if most < size.tasks else size.why
        cut.append(f"{len(order)} tasks cut into {_stacks_of(least)}: {cause}")
    bundles = []
    for piece in _even(order, least):
        own = [tasks[place] for place in sorted(piece)]
        reasons = [*why, *_padding_reason(own, limits), *_stack_reason(own), *cut]
        bundles.append(_bundle(tasks, piece, size, reasons))
    return bundles


def _stacks_of(most: int) -> str:
    return f"stacks of at most {most}" if most > 1 else "groups of one"


def _most_that_fit(tasks: list[Task], limits: Limits) -> tuple[int, str]:
    """How many of ``tasks`` (widest first) fit into the room together; at least one."""
    if limits.fits(tasks):
        return len(tasks), ""
    low, high = 1, len(tasks)  # low fits or is alone, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if limits.fits(tasks[:middle]) else (low, middle)
    assert limits.room is not None
    return low, f"{high} of them need {_size(limits.bytes(tasks[:high]))} of {_size(limits.room)}"


def _even(order: list[int], most: int) -> list[list[int]]:
    """``order`` in as few runs of at most ``most`` as there can be, of nearly equal length."""
    count = -(-len(order) // most)
    short, longer = divmod(len(order), count)
    pieces, begin = [], 0
    for index in range(count):
        end = begin + short + (index < longer)
        pieces.append(order[begin:end])
        begin = end
    return pieces


def _stack_reason(tasks: list[Task]) -> list[str]:
    if len(tasks) < 2:
        return []
    varied = [name for name in _numbers() if len({getattr(task, name) for task in tasks}) > 1]
    what = f"they differ in {', '.join(varied)} alone" if varied else "they are equal"
    return [f"{tasks[0].model_name}: {len(tasks)} tasks stacked, {what}"]


def _numbers() -> list[str]:
    return [f.name for f in fields(Task) if f.name not in ("graph", "model", "name")]


# ---- sharing a device --------------------------------------------------------------------------------


def _sharing(bundles: list[StackDraft], limits: Limits) -> list[tuple[list[StackDraft], list[str]]]:
    """Bundles in groups: the fullest first, each joined to the first (or, to be woven, most similar) that has room."""
    if len(bundles) == 1:
        return [(bundles, [])]
    if not (limits.device == "cuda" if limits.weave is None else limits.weave):
        where = "on a CPU one operator runs at a time" if limits.device == "cpu" else "each was to have its own group"
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
        obstacle = _no_room(bundle, joined, limits, "concurrent")
        if obstacle is None:
            why.append(f"{_called(bundle)} beside {_called(joined[0])}: neither fills the device")
            joined.append(bundle)
            return
        refused.append(obstacle)
    groups.append(([bundle], refused[:1]))


def _trains_alone(bundle: StackDraft, limits: Limits) -> str | None:
    """Why no other stack trains beside this one, whatever the room; None where one may."""
    if bundle.tasks[0].model not in MODELS:
        return f"{bundle.tasks[0].model_name} in a group of its own: what its operators do to a device is not known"
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
    """Why ``bundle`` is not woven into a group; None where it may."""
    if score < ALIKE:
        name, other = _called(bundle), _called(joined[0])
        return f"{name} not woven with {other}: similarity {score:.2f} is below {ALIKE} ({words})"
    return _no_room(bundle, joined, limits, "woven with")


def _no_room(bundle: StackDraft, joined: list[StackDraft], limits: Limits, how: str) -> str | None:
    """Why a group has no room for ``bundle``, on the device or in its memory; None where it has."""
    apart = f"{_called(bundle)} not {how} {_called(joined[0])}"
    load = bundle.load + sum(b.load for b in joined)
    if load > 1.0:
        return f"{apart}: together they would be {load:.1f} times what fills the device"
    together = [task for b in (*joined, bundle) for task in b.tasks]
    if not limits.fits(together):
        assert limits.room is not None
        return f"{apart}: together {_size(limits.bytes(together))} of {_size(limits.room)}"
    return None


# ---- words -------------------------------------------------------------------------------------------


def _called(bundle: StackDraft) -> str:
    task = bundle.tasks[0]
    depth = f" of {task.layers} layers" if task.model in MODELS else ""
    return f"{task.model_name}{depth} x {len(bundle.tasks)}"


def _listed(values: Iterable[int]) -> str:
    """The values, or how many there are between which; ``MAX_LISTED`` of them can be read."""
    found = sorted(values)
    if len(found) > MAX_LISTED:
        return f"from {found[0]} to {found[-1]} ({len(found)} of them)"
    return ", ".join(map(str, found))


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
