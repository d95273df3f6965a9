"""Look: what this process and all others did on the machine until a moment."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
TICKS = 100.0  # of a second, as Linux counts them for every program
MOST_BUSY = 0.15  # of all cores that others may take while something is measured


@dataclass(frozen=True)
class Look:
    """What was done until a moment: ``now`` by the clock, CPU seconds of this process and of all, in ``cores``."""

    now: float
    own: float
    all: float
    cores: int

    @classmethod
    def here(cls) -> Look | None:
        """Now, on the cores that this process may use; None where the system does not say."""
        try:
            mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            lines = [line.split() for line in STAT.read_text(encoding="ascii").splitlines()]
            busy = [sum(map(int, [*words[1:4], *words[6:9]])) for words in lines if words and words[0] in mine]
        except (OSError, ValueError, AttributeError):
            return None
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return cls(time.monotonic(), own, sum(busy) / TICKS, len(busy)) if busy else None

    def others(self, before: Look) -> float:
        """Cores that other processes took since ``before``."""
        return max((self.all - before.all) - (self.own - before.own), 0.0) / max(self.now - before.now, 1e-9)
