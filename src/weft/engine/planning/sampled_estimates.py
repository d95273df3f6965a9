"""Choose which groups of a plan get a dry run; extrapolate the others: a dry run takes time.

Of up to :data:`MAX_TASKS_TO_DRY_RUN` tasks every group gets a dry run. Of more, the largest group of every kind comes
first, then the others by size, until :data:`MAX_DRY_RUNS` members have been dry-run. The cost of the rest is that of a
dry-run group of the same kind, scaled by the rule of thumb; none of them is close to the memory limit.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weft.core.cost import SIZES, Cost
from weft.core.plan import Plan
from weft.core.task import Task
from weft.planner.cost.rule_of_thumb import attention_bytes, memory, rates_of, work
from weft.planner.grouping.limits import SURELY

if TYPE_CHECKING:
    from weft.engine.planning.estimator import Estimate, Estimator

MAX_TASKS_TO_DRY_RUN = 1024  # with more tasks, some groups are extrapolated
MAX_DRY_RUNS = 384  # members of groups of so many: following more would make a plan of thousands take minutes
MAX_SOLO_DRY_RUNS = 12  # tasks of different structures that get a dry run alone, of so many


@dataclass(frozen=True)
class RoughEstimate:
    """A group by rule of thumb: its kind, bytes and the most they may turn out to be, and seconds of an epoch."""

    tasks: Sequence[Task]
    plan: Plan
    kind: Hashable
    bytes: float
    most: float
    seconds: float

    @classmethod
    def of(cls, tasks: Sequence[Task], plan: Plan, estimator: Estimator) -> RoughEstimate:
        """By the sizes of its tasks, each as wide as the widest of its stack."""
        stats, device = estimator.stats(tasks[0]), estimator.machine.device
        rates = rates_of(device, estimator.machine, tasks[0].precision)
        kinds, seconds = set(), 0.0
        for slots in plan.stack_members:
            widest = max((tasks[slot] for slot in slots), key=lambda task: task.hidden)
            one = work(widest, stats)
            seconds += one.launches * rates.launch + len(slots) * one.seconds(rates)
            heads = (widest.heads, widest.out_heads) if widest.traits is not None and widest.traits.has_heads else ()
            kinds.add((widest.model_name, widest.layers, *heads))
        rough = memory(list(tasks), stats, device)
        most = SURELY * rough + attention_bytes(list(tasks), stats)
        return cls(tasks, plan, (tasks[0].graph_name, frozenset(kinds)), rough, most, seconds)


def group_estimates(
    plans: Sequence[Plan], tasks: Mapping[str, Task], estimator: Estimator, room: int
) -> list[Estimate]:
    """What every group takes, in the order of ``plans``."""
    groups = [RoughEstimate.of([tasks[name] for name in plan.members], plan, estimator) for plan in plans]
    found: dict[int, Estimate] = {}
    spent, most = 0, MAX_DRY_RUNS if len(tasks) > MAX_TASKS_TO_DRY_RUN else len(tasks)
    for place in _in_order(groups):
        one = groups[place]
        known = estimator.knows(one.tasks, one.plan)
        if known or spent + len(one.tasks) <= most or not found or not _surely_fits(one, room):
            found[place] = estimator.together(one.tasks, one.plan)
            spent += 0 if known else len(one.tasks)
    return [found[i] if i in found else _compared(one, groups, found) for i, one in enumerate(groups)]


def _in_order(groups: Sequence[RoughEstimate]) -> list[int]:
    """The largest of every kind, then the others, large ones first."""
    by_size = sorted(range(len(groups)), key=lambda place: -groups[place].bytes)
    first: dict[Hashable, int] = {}
    for place in by_size:
        first.setdefault(groups[place].kind, place)
    leading = set(first.values())
    return [*first.values(), *(place for place in by_size if place not in leading)]


def _surely_fits(group: RoughEstimate, room: int) -> bool:
    return all(task.traits is not None for task in group.tasks) and group.most <= room


def _compared(group: RoughEstimate, groups: Sequence[RoughEstimate], found: Mapping[int, Estimate]) -> Estimate:
    """The estimate of a dry-run group, made as large as ``group`` is: the nearest of its kind, or of all."""
    alike = [place for place in found if groups[place].kind == group.kind] or list(found)
    place = min(alike, key=lambda place: abs(groups[place].bytes - group.bytes))
    other, estimate = groups[place], found[place]
    note = f"extrapolated from group {place + 1} by size, without a dry run of its own: there are many groups"
    return replace(
        estimate,
        cost=_scaled(estimate.cost, group.bytes / other.bytes, group.seconds / other.seconds),
        memory=replace(estimate.memory, alive=(), advice=(), timeline={}, phases=()),
        program=replace(estimate.program, note=note),
        parameters=(),
        weights=(),
        extrapolated=True,
    )


def _scaled(cost: Cost, larger: float, longer: float) -> Cost:
    """A cost with other bytes and seconds; nothing that a calibration could learn from."""
    sizes = {name: int(larger * getattr(cost, name)) for name in SIZES}
    times = {
        name: {key: longer * value for key, value in getattr(cost, name).items()}
        for name in ("seconds", "families", "phases")
    }
    kinds = {key: int(larger * value) for key, value in cost.bytes.items()}
    return replace(cost, **sizes, **times, bytes=kinds, uncorrected={})


def alone_estimates(tasks: Sequence[Task], estimator: Estimator) -> list[Estimate | None]:
    """What every task takes by itself; of very many, None beyond the first :data:`MAX_SOLO_DRY_RUNS` structures."""
    left = MAX_SOLO_DRY_RUNS if len(tasks) > MAX_TASKS_TO_DRY_RUN else len(tasks)
    found: list[Estimate | None] = []
    for task in tasks:
        known = estimator.knows([task])
        left -= not known
        found.append(estimator.alone(task) if known or left >= 0 else None)
    return found
