"""Limits: the device, its rates and its memory budget, which groups must stay within."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.task import Task
from weft.planner.cost.rule import LIBRARIES, Rates, attention_bytes, hidden_bytes, rates_of, rule_memory, work

# ---- Choose the number of tasks in a group: the lowest time per task and epoch, measured or by rule.
#
# ``find_group_size`` is the search, free of any device; ``Throughput`` is what such searches found on one
# machine, by class of graph, model and width.

MIN_GAIN = 0.02  # a gain below this is noise: the smaller group is taken
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0

Measured = dict[int, float]
"""Milliseconds per task and epoch by the number of tasks T."""


def find_group_size(measure: Callable[[int], float], limit: int, probes: int = 3) -> tuple[int, Measured]:
    """The T in 1..``limit`` with the lowest ``measure(T)`` (time per task and epoch), and all that was measured.

    T is doubled while that pays, then the peak is narrowed down by at most ``probes`` golden sections of the
    interval around it. ``measure`` may say ``inf`` for a group that does not run (memory).
    """
    seen: Measured = {}

    def at(tasks: int) -> float:
        if tasks not in seen:
            seen[tasks] = measure(tasks)
        return seen[tasks]

    at(1)
    size = 1
    while size < limit:
        following = min(2 * size, limit)
        if at(following) > seen[size] * (1.0 - MIN_GAIN) and size > 1 and following > 4:
            break  # T = 2 may pay little where T = 4 and more do
        size = following
    _narrow(at, seen, limit, probes)
    return best_size(seen), seen


def _narrow(at: Callable[[int], float], seen: Measured, limit: int, probes: int) -> None:
    """Golden sections between the neighbours of the best so far."""
    best = best_size(seen)
    low, high = max(best // 2, 1), min(2 * best, limit)
    for _ in range(probes):
        if high - low < 4:
            return
        left, right = round(high - GOLDEN * (high - low)), round(low + GOLDEN * (high - low))
        if at(left) <= at(right):
            high = right
        else:
            low = left


def best_size(measured: Mapping[int, float]) -> int:
    """The smallest T that is within :data:`MIN_GAIN` of the fastest."""
    fastest = min(measured.values())
    return min(tasks for tasks, ms in measured.items() if ms <= fastest * (1.0 + MIN_GAIN))


def shape_class(stats: GraphStats) -> str:
    """Graphs of one class have nodes and edges within the same power of two: ``"n17e21"``."""
    return f"n{stats.num_nodes.bit_length() - 1}e{max(stats.num_edges, 1).bit_length() - 1}"


def key_of(task: Task, stats: GraphStats) -> str:
    """Under which key the table keeps measurements for ``task``: class of graph, model, width, precision."""
    return f"{shape_class(stats)} {task.model_name} {task.hidden} {task.precision}"


@dataclass(frozen=True)
class Throughput:
    """What was measured on ``machine``: key (:func:`key_of`) -> T -> milliseconds per task and epoch.

    ``busy``: key -> T -> the share of the time that the device was busy, if the driver reports it (NVML).
    """

    machine: str
    table: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    busy: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def group_size(self, task: Task, stats: GraphStats) -> int | None:
        """Where the throughput of such tasks peaks; None if nothing was measured."""
        measured = {size: ms for size, ms in self.table.get(key_of(task, stats), {}).items() if math.isfinite(ms)}
        return best_size(measured) if measured else None

    def ms(self, task: Task, stats: GraphStats, tasks: int) -> float | None:
        """Milliseconds per task and epoch with T = ``tasks``, where that was measured."""
        return self.table.get(key_of(task, stats), {}).get(tasks)

    def busy_share(self, task: Task, stats: GraphStats, tasks: int) -> float | None:
        """How busy ``tasks`` of such tasks kept the device, where that was measured."""
        return self.busy.get(key_of(task, stats), {}).get(tasks)

    def with_measured(
        self,
        task: Task,
        stats: GraphStats,
        measured: Mapping[int, float],
        busy: Mapping[int, float] | None = None,
    ) -> Throughput:
        """The table with more measurements of one kind of task; newer ones replace older."""
        key = key_of(task, stats)
        table = {**self.table, key: {**self.table.get(key, {}), **measured}}
        shares = {**self.busy, key: {**self.busy.get(key, {}), **busy}} if busy else self.busy
        return Throughput(self.machine, table, shares)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; sizes that did not run are left out."""
        return {"machine": self.machine, "table": _plain(self.table), "busy": _plain(self.busy)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Throughput:
        """The inverse of :meth:`to_dict`."""
        return cls(str(data.get("machine", "")), _sizes(data.get("table", {})), _sizes(data.get("busy", {})))


def _plain(table: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, float]]:
    return {
        key: {str(size): value for size, value in sorted(found.items()) if math.isfinite(value)}
        for key, found in table.items()
    }


def _sizes(data: Mapping[str, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    return {str(key): {int(size): float(value) for size, value in found.items()} for key, found in data.items()}


SURELY = 4.0  # times the rule of thumb for memory: with what heads take on top, no known model takes more
WORKSPACES = 4  # of cuBLAS: two threads call it, each on two streams
SEGMENTS = 64 << 20  # what an allocator takes at once, small and large, in each of its pools
USABLE = 0.95  # of the memory that a machine offers, where no budget is given

MemoryOf = Callable[[Sequence[Task]], float]


@dataclass(frozen=True)
class Limits:
    """Limits of groups: the device and its rates, bytes, and earlier measurements."""

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
        return (
            self.memory_of(tasks) if self.memory_of is not None else rule_memory(list(tasks), self.stats, self.device)
        )

    @property
    def room(self) -> float | None:
        """Bytes that a group may take; None: no limit."""
        if self.budget is not None or self.machine is None:
            return self.budget
        return USABLE * self.machine.available_bytes

    def fits(self, tasks: Sequence[Task]) -> bool:
        """Whether a group of ``tasks`` fits into the budget."""
        return self.room is None or self.surely_fits(tasks) or self.bytes(tasks) <= self.room

    def surely_fits(self, tasks: Sequence[Task]) -> bool:
        """Whether several times the rule of thumb fits into the budget, so that no dry run is needed."""
        assert self.room is not None
        known = all(task.traits is not None for task in tasks)
        most = SURELY * rule_memory(list(tasks), self.stats, self.device) + attention_bytes(list(tasks), self.stats)
        return known and most <= self.room

    def most_bytes(self, tasks: Sequence[Task]) -> int:
        """Bytes that no group of ``tasks`` of Weft's own models exceeds; what libraries take is the same for all."""
        own = rule_memory(list(tasks), self.stats, self.device) - (LIBRARIES if self.device == "cuda" else 0)
        return math.ceil(SURELY * own + attention_bytes(list(tasks), self.stats)) + self._libraries()

    def _libraries(self) -> int:
        """Bytes that a process has on a GPU whatever it trains, at most."""
        if self.device != "cuda":
            return 0
        known = self.machine
        return LIBRARIES if known is None else known.context_bytes + WORKSPACES * known.workspace_bytes + SEGMENTS


def size_in_words(count: float) -> str:
    """Bytes for a sentence."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"


# ---- Decide how many tasks of one kind fill a device: from measurements if there are any, else by rule.

LAUNCH_SHARE = 0.01  # launches below this share of a step: more tasks no longer hide anything
MAX_MEMBERS = 256  # members of a group: beyond, one failure costs too many their place
# Features of all tasks of a stack. On arxiv's shape a batched prototype took 3.5 ms per task with 8 x 64 and 1.8 ms
# with 32 x 64: wide rows keep the gathers and the weight gradients busy, not only launches hidden.
FEATURES_PER_ROW = 2048


@dataclass(frozen=True)
class Size:
    """The T at which the time per task stops falling, the share of the device it occupies, and how that is known."""

    tasks: int
    why: str
    occupancy: float = 1.0


def fitting_size(task: Task, stats: GraphStats, device: str, rates: Rates, throughput: Throughput | None) -> Size:
    """How many tasks like ``task`` fill the device."""
    measured = throughput.group_size(task, stats) if throughput is not None else None
    if throughput is None or measured is None:
        return Size(*_by_rule(task, stats, device, rates))
    busy = throughput.busy_share(task, stats, measured)
    share = "" if busy is None else f", the GPU {busy:.0%} busy"
    return Size(measured, f"throughput peaks at {measured} tasks (measured on this machine{share})", busy or 1.0)


def _by_rule(task: Task, stats: GraphStats, device: str, rates: Rates) -> tuple[int, str]:
    one = work(task, stats)
    hidden = one.launches * rates.launch / (LAUNCH_SHARE * max(one.seconds(rates), 1e-9))
    wide = -(-FEATURES_PER_ROW // task.hidden) if device == "cuda" else 1
    size = min(max(_power_of_two(hidden), wide), MAX_MEMBERS)
    reason = f"from {size} tasks on, launches are under {LAUNCH_SHARE:.0%} of a step (by rule, not measured)"
    if size == wide:
        reason = f"{size} x {task.hidden} features are rows wide enough (by rule, not measured)"
    if size == MAX_MEMBERS:
        reason = f"no group has more than {MAX_MEMBERS} members"
    if device == "cpu":
        row = max(hidden_bytes(task, stats), 1)
        cached = max(rates.cache // row, 1)
        if cached < size:
            size, reason = cached, f"the rows of {cached} tasks fill the cache (by rule, not measured)"
    return size, reason


def _power_of_two(value: float) -> int:
    return 1 << (max(int(value), 1) - 1).bit_length()
