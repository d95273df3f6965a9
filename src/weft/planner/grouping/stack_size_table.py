"""Choose the number of tasks in a group: the lowest time per task and epoch, measured or by rule.

``find_group_size`` is the search, free of any device; ``Throughput`` is what such searches found on one
machine, by class of graph, model and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core.graph_stats import GraphStats
from weft.core.task import Task

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
