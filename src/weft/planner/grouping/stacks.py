"""Make stacks of tasks of one structure: pad or separate widths, then cut by throughput and by memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields

from weft.core.compatibility import alone_reason, padding_obstacle, stack_key, width
from weft.core.settings import identity
from weft.core.task import Task
from weft.planner.cost.rule import work
from weft.planner.grouping.limits import Limits, Size, fitting_size, size_in_words

# ---- Decide which widths share a stack, padded with zeros: if the zeros cost less than a separate step.
#
# Tasks that differ in width alone can share one stack, or be several. A stack costs its launches once; every
# member of it costs what the widest costs. The best way to cut the sorted widths into neighbouring runs is
# found exactly, by dynamic programming over the few distinct widths of a sweep.


def cut_widths(counts: Mapping[int, int], cost: Callable[[int], float], overhead: float) -> list[list[int]]:
    """The distinct widths of ``counts`` (width -> tasks of it) in runs that share a stack, narrow to wide.

    ``cost(width)`` is what one task costs at that width, ``overhead`` what one more stack costs.
    """
    order = sorted(counts)
    best: list[tuple[float, int]] = [(0.0, 0)]  # for the first i widths: their cost, and where the last run begins
    for end in range(1, len(order) + 1):
        widest = cost(order[end - 1])
        options = []
        for begin in range(end):
            tasks = sum(counts[width] for width in order[begin:end])
            options.append((best[begin][0] + tasks * widest + overhead, begin))
        best.append(min(options))
    runs, end = [], len(order)
    while end:
        begin = best[end][1]
        runs.append(order[begin:end])
        end = begin
    return runs[::-1]


def waste(counts: Mapping[int, int], cost: Callable[[int], float]) -> float:
    """The share of the work of a padded run that is spent on zeros."""
    padded = sum(counts.values()) * cost(max(counts))
    useful = sum(tasks * cost(width) for width, tasks in counts.items())
    return 1.0 - useful / padded if padded else 0.0


MAX_LISTED = 8  # widths in a sentence


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
        return len(self.tasks) / self.size.tasks


def by_structure(tasks: list[Task], places: list[int]) -> list[list[int]]:
    """Places of tasks that differ in numbers and widths alone."""
    found: dict[tuple[object, ...], list[int]] = {}
    for place in places:
        own = (place,) if alone_reason(tasks[place]) is not None else ()
        found.setdefault((*stack_key(tasks[place]).items(), *own), []).append(place)
    return list(found.values())


def stacks_of(tasks: list[Task], places: list[int], limits: Limits) -> list[StackDraft]:
    """The stacks of tasks with one structure: widths padded or apart, then cut to size, each with its reasons."""
    return [b for inside, why in padded(tasks, places, limits) for b in _cut(tasks, inside, why, limits)]


def padded(tasks: list[Task], places: list[int], limits: Limits) -> list[tuple[list[int], list[str]]]:
    """Tasks of one structure by the widths that share a stack, with the reason."""
    counts = Counter(width(tasks[place]) for place in places)
    sample = tasks[places[0]]
    runs, why = _runs(sample, counts, limits)
    result = []
    for run in runs:
        inside = [place for place in places if width(tasks[place]) in run]
        result.append((inside, why))
    return result


def stack_draft(tasks: list[Task], places: list[int], size: Size, why: list[str]) -> StackDraft:
    """The tasks at ``places`` as one stack."""
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


def padding_reason(tasks: list[Task], limits: Limits) -> list[str]:
    """Why tasks of different widths share a stack; nothing if they are equally wide."""
    counts, sample = Counter(width(task) for task in tasks), tasks[0]
    if len(counts) < 2:
        return []
    cost = _cost(sample, limits)
    extra = sum(counts.values()) * cost(max(counts)) * waste(counts, cost)
    saved = (len(counts) - 1) * _overhead(sample, limits)
    more = "1 more stack" if len(counts) == 2 else f"{len(counts) - 1} more stacks"
    return [
        f"widths {_listed(counts)} padded with zeros to {max(counts)}: {waste(counts, cost):.0%} of the work is zeros, "
        f"about {extra * 1e6:,.0f} us per epoch against {saved * 1e6:,.0f} us for the launches of {more}"
    ]


def _cut(tasks: list[Task], places: list[int], why: list[str], limits: Limits) -> list[StackDraft]:
    """One stack, or as many equal ones as its limits require; wide tasks stay together, so that less is padded."""
    order = sorted(places, key=lambda place: (-width(tasks[place]), place))
    sample = tasks[order[0]]
    size = fitting_size(sample, limits.stats, limits.device, limits.rates(sample))
    most, memory_reason = _most_that_fit([tasks[place] for place in order], limits)
    least = min(size.tasks, most)
    cut = []
    if len(order) > least:
        cause = memory_reason if most < size.tasks else size.why
        cut.append(f"{len(order)} tasks cut into {_stacks_of(least)}: {cause}")
    bundles = []
    for piece in _even(order, least):
        own = [tasks[place] for place in sorted(piece)]
        reasons = [*why, *padding_reason(own, limits), *_stack_reason(own), *cut]
        bundles.append(stack_draft(tasks, piece, size, reasons))
    return bundles


def _stacks_of(most: int) -> str:
    return f"stacks of at most {most}" if most > 1 else "groups of one"


def _most_that_fit(tasks: list[Task], limits: Limits) -> tuple[int, str]:
    """How many of ``tasks`` (widest first) fit into the budget together; at least one."""
    if limits.fits(tasks):
        return len(tasks), ""
    low, high = 1, len(tasks)  # low fits or is alone, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if limits.fits(tasks[:middle]) else (low, middle)
    assert limits.room is not None
    return low, f"{high} of them need {size_in_words(limits.bytes(tasks[:high]))} of {size_in_words(limits.room)}"


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
        why = alone_reason(tasks[0])
        return [] if why is None else [f"{tasks[0].label} in a stack of its own: {why}"]
    varied = [name for name in _numbers() if len({identity(getattr(task, name)) for task in tasks}) > 1]
    what = f"they differ only in {', '.join(varied)}" if varied else "they are equal"
    return [f"{tasks[0].model_name}: {len(tasks)} tasks stacked, {what}"]


def _numbers() -> list[str]:
    return [f.name for f in fields(Task) if f.name not in ("graph", "model", "model_args", "name")]


def _listed(values: Iterable[int]) -> str:
    """The values, or how many there are between which; ``MAX_LISTED`` of them can be read."""
    found = sorted(values)
    if len(found) > MAX_LISTED:
        return f"from {found[0]} to {found[-1]} ({len(found)} of them)"
    return ", ".join(map(str, found))
