"""Decide how many tasks of one kind fill a device: from measurements if there are any, else by rule."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.planner.cost.rule_of_thumb import Rates, hidden_bytes, work
from weft.planner.grouping.stack_size_table import Throughput

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
