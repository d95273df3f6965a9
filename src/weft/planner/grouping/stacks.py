"""Make stacks of tasks of one structure: pad or separate widths, then cut by throughput and by memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields

from weft.core.compatibility import alone_reason, padding_obstacle, stack_key, width
from weft.core.settings import identity
from weft.core.task import Task
from weft.planner.cost.rule import rates_of, work
from weft.planner.grouping.limits import GroupLimits, Size, fitting_size, size_in_words

MAX_LISTED = 8  # widths in a sentence


def cut_widths(counts: Mapping[int, int], cost: Callable[[int], float], overhead: float) -> list[list[int]]:
    """The distinct widths of ``counts`` (width -> tasks of it) in runs that share a stack, narrow to wide.

    ``cost(width)`` is what one task costs at that width, ``overhead`` what one more stack costs. A stack costs its
    launches once; every member of it costs what the widest costs. The best way to cut the sorted widths into
    neighbouring runs is found exactly, by dynamic programming over the few distinct widths of a sweep.
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


@dataclass
class StackDraft:
    """Tasks that will be one stack: their ``positions`` in the list of all, and why it is as it is."""

    tasks: list[Task]
    positions: list[int]
    size: Size
    why: list[str] = field(default_factory=list)

    @property
    def load(self) -> float:
        """The share of the device that the stack fills."""
        return len(self.tasks) / self.size.tasks


def by_structure(tasks: list[Task], positions: list[int]) -> list[list[int]]:
    """Positions of tasks that differ in numbers and widths alone."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for position in positions:
        alone = (position,) if alone_reason(tasks[position]) is not None else ()
        alike.setdefault((*stack_key(tasks[position]).items(), *alone), []).append(position)
    return list(alike.values())


def padded(tasks: list[Task], positions: list[int], limits: GroupLimits) -> list[tuple[list[int], list[str]]]:
    """Tasks of one structure by the widths that share a stack, with the reason."""
    counts, sample = Counter(width(tasks[position]) for position in positions), tasks[positions[0]]
    runs, why = [list(counts)], []
    obstacle = padding_obstacle(sample)
    if len(counts) > 1 and obstacle is not None:
        runs, why = [[size] for size in sorted(counts)], [f"widths {_listed(counts)} apart: {obstacle}"]
    elif len(counts) > 1:
        cost, overhead = _prices(sample, limits)
        runs = cut_widths(counts, cost, overhead)
        if len(runs) > 1:
            zeros = f"{waste(counts, cost):.0%} of the work would be zeros"
            why = [f"widths {_listed(counts)} not all padded to {max(counts)}: {zeros}"]
    return [([position for position in positions if width(tasks[position]) in run], why) for run in runs]


def _prices(sample: Task, limits: GroupLimits) -> tuple[Callable[[int], float], float]:
    """Seconds of an epoch of one such task by its width, and of the launches of one more stack."""
    rates = rates_of(limits.device, limits.machine, sample.precision)
    overhead = work(sample, limits.stats).launches * rates.launch
    return lambda hidden: work(sample, limits.stats, hidden).seconds(rates), overhead


def padding_reason(tasks: list[Task], limits: GroupLimits) -> list[str]:
    """Why tasks of different widths share a stack; nothing if they are equally wide."""
    counts, sample = Counter(width(task) for task in tasks), tasks[0]
    if len(counts) < 2:
        return []
    cost, overhead = _prices(sample, limits)
    extra = sum(counts.values()) * cost(max(counts)) * waste(counts, cost)
    saved = (len(counts) - 1) * overhead
    more = "1 more stack" if len(counts) == 2 else f"{len(counts) - 1} more stacks"
    return [
        f"widths {_listed(counts)} padded with zeros to {max(counts)}: {waste(counts, cost):.0%} of the work is zeros, "
        f"about {extra * 1e6:,.0f} us per epoch against {saved * 1e6:,.0f} us for the launches of {more}"
    ]


def cut_stacks(tasks: list[Task], positions: list[int], why: list[str], limits: GroupLimits) -> list[StackDraft]:
    """One stack, or as many equal ones as its limits require; wide tasks stay together, so that less is padded."""
    order = sorted(positions, key=lambda position: (-width(tasks[position]), position))
    size = fitting_size(tasks[order[0]], limits)
    ordered, most, memory_reason = [tasks[position] for position in order], len(order), ""
    if not limits.fits(ordered):  # at least one, which is then alone
        most, high = 1, len(order)  # so many fit, and so many do not
        while high - most > 1:
            middle = (most + high) // 2
            most, high = (middle, high) if limits.fits(ordered[:middle]) else (most, middle)
        assert limits.room is not None
        sizes = f"{size_in_words(limits.bytes(ordered[:high]))} of {size_in_words(limits.room)}"
        memory_reason = f"{high} of them need {sizes}"
    largest = min(size.tasks, most)
    cut = []
    if len(order) > largest:
        cause = memory_reason if most < size.tasks else size.why
        pieces = f"stacks of at most {largest}" if largest > 1 else "groups of one"
        cut.append(f"{len(order)} tasks cut into {pieces}: {cause}")
    count = -(-len(order) // largest)
    shorter, longer = divmod(len(order), count)  # pieces of nearly equal length
    bundles, begin = [], 0
    for number in range(count):
        end = begin + shorter + (number < longer)
        chosen = sorted(order[begin:end])
        members = [tasks[position] for position in chosen]
        first = members[0]
        reasons = [*why, *padding_reason(members, limits)]
        if len(members) > 1:
            names = [f.name for f in fields(Task) if f.name not in ("graph", "model", "model_args", "name")]
            varied = [name for name in names if len({identity(getattr(task, name)) for task in members}) > 1]
            what = f"they differ only in {', '.join(varied)}" if varied else "they are equal"
            reasons.append(f"{first.model_name}: {len(members)} tasks stacked, {what}")
        elif alone_reason(first) is not None:
            reasons.append(f"{first.label} in a stack of its own: {alone_reason(first)}")
        reasons += cut
        bundles.append(StackDraft(members, chosen, size, reasons))
        begin = end
    return bundles


def _listed(values: Iterable[int]) -> str:
    """The values, or their range if there are more than ``MAX_LISTED``."""
    ordered = sorted(values)
    if len(ordered) > MAX_LISTED:
        return f"from {ordered[0]} to {ordered[-1]} ({len(ordered)} of them)"
    return ", ".join(map(str, ordered))
