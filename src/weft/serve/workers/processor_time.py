"""What a group took of the processor: seconds in all, seconds of computing, and seconds in which it had to wait for it.

The last two tell a task that is slow from a machine that others keep busy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

STATISTICS = Path("/proc/self/schedstat")  # of the main thread: nanoseconds on a core, and ready but on none


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds: in all, of computing by all threads, and of the main thread while it was ready but had no core."""

    seconds: float
    cpu_seconds: float
    waited_seconds: float | None  # None where the system does not say

    @classmethod
    def now(cls) -> ProcessorTime:
        """Readings of three clocks."""
        return cls(time.perf_counter(), time.process_time(), _waited())

    def since(self, before: ProcessorTime) -> dict[str, float | None]:
        """What has passed, as plain data."""
        waited, former = self.waited_seconds, before.waited_seconds
        return {
            "seconds": self.seconds - before.seconds,
            "cpu_seconds": self.cpu_seconds - before.cpu_seconds,
            "waited_seconds": None if waited is None or former is None else waited - former,
        }


def _waited() -> float | None:
    try:
        return int(STATISTICS.read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return None
