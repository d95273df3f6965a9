"""How many tasks a group has: by rule, within the memory of the device.

The rule needs no measurement. A search that trains stacks of growing size, bounded by the utilisation that the driver
reports, takes about 8 s and pays for itself only in sweeps of more than 160 s of training (docs/papers.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.run_options import MAX_MEMBERS
from weft.core.task import Task
from weft.planner.cost.rule import LIBRARIES, attention_bytes, hidden_bytes, rates_of, rule_memory, work

RULE_SAFETY_FACTOR = 4.0  # on the rule of thumb for memory: with what heads take on top, no known model takes more
WORKSPACES = 4  # of cuBLAS: two threads call it, each on two streams
SEGMENTS = 64 << 20  # what an allocator takes at once, small and large, in each of its pools
USABLE = 0.95  # of the memory that a machine offers, if there is no budget

MemoryOf = Callable[[Sequence[Task]], float]


@dataclass(frozen=True)
class GroupLimits:
    """Limits of groups: the device with its rates, and bytes."""

    stats: GraphStats
    device: str
    machine: Machine | None = None
    memory_of: MemoryOf | None = None
    budget: float | None = None
    weave: str | None = None

    @property
    def merges(self) -> bool:
        """Whether stacks are merged into one step."""
        return self.weave in ("merged", "merged+push")

    def bytes(self, tasks: Sequence[Task]) -> float:
        """Bytes of a group of ``tasks``: the engine's estimate, or a rule of thumb."""
        if self.memory_of is not None:
            return self.memory_of(tasks)
        return rule_memory(list(tasks), self.stats, self.device)

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
        rule = rule_memory(list(tasks), self.stats, self.device)
        most = RULE_SAFETY_FACTOR * rule + attention_bytes(list(tasks), self.stats)
        return all(task.traits is not None for task in tasks) and most <= self.room

    def most_bytes(self, tasks: Sequence[Task]) -> int:
        """Bytes that no group of ``tasks`` of built-in models exceeds; what libraries take is the same for all."""
        libraries = LIBRARIES if self.device == "cuda" else 0
        rule = rule_memory(list(tasks), self.stats, self.device) - libraries
        if libraries and self.machine is not None:
            libraries = self.machine.context_bytes + WORKSPACES * self.machine.workspace_bytes + SEGMENTS
        return math.ceil(RULE_SAFETY_FACTOR * rule + attention_bytes(list(tasks), self.stats)) + libraries


def size_in_words(count: float) -> str:
    """Bytes for a sentence."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"


LAUNCH_SHARE = 0.01  # launches below this share of a step: more tasks no longer hide anything
# Features of all tasks of a stack. On arxiv's shape a batched prototype took 3.5 ms per task with 8 x 64 and 1.8 ms
# with 32 x 64: wide rows keep the gathers and the weight gradients busy, not only launches hidden.
FEATURES_PER_ROW = 2048


@dataclass(frozen=True)
class Size:
    """The number of tasks T at which the time per task stops falling, and the reason."""

    tasks: int
    why: str


def fitting_size(task: Task, limits: GroupLimits) -> Size:
    """How many tasks like ``task`` fill the device."""
    stats = limits.stats
    rates, epoch = rates_of(limits.device, limits.machine, task.precision), work(task, stats)
    hidden = epoch.launches * rates.launch / (LAUNCH_SHARE * max(epoch.seconds(rates), 1e-9))
    wide = -(-FEATURES_PER_ROW // task.hidden) if limits.device == "cuda" else 1
    power_of_two = 1 << (max(int(hidden), 1) - 1).bit_length()
    size = min(max(power_of_two, wide), MAX_MEMBERS)
    reason = f"from {size} tasks on, launches are under {LAUNCH_SHARE:.0%} of a step (by rule, not measured)"
    if size == wide:
        reason = f"{size} x {task.hidden} features are rows wide enough (by rule, not measured)"
    if size == MAX_MEMBERS:
        reason = f"no group has more than {MAX_MEMBERS} members"
    if limits.device == "cpu":
        cached = max(rates.cache // max(hidden_bytes(task, stats), 1), 1)
        if cached < size:
            size, reason = cached, f"the rows of {cached} tasks fill the cache (by rule, not measured)"
    return Size(size, reason)
