"""Limits: the device, its rates and its memory budget, which groups must stay within."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.task import Task
from weft.planner.cost.rule_of_thumb import LIBRARIES, Rates, attention_bytes, memory, rates_of
from weft.planner.grouping.stack_size_table import Throughput

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
        return self.memory_of(tasks) if self.memory_of is not None else memory(list(tasks), self.stats, self.device)

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
        most = SURELY * memory(list(tasks), self.stats, self.device) + attention_bytes(list(tasks), self.stats)
        return known and most <= self.room

    def most_bytes(self, tasks: Sequence[Task]) -> int:
        """Bytes that no group of ``tasks`` of Weft's own models exceeds; what libraries take is the same for all."""
        own = memory(list(tasks), self.stats, self.device) - (LIBRARIES if self.device == "cuda" else 0)
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
