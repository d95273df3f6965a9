"""TimeLimit: divide the seconds of a measurement among its parts, so that the whole ends in time."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeLimit:
    """``seconds`` for parts that together weigh ``weight``; what a part does not use is left to those after it."""

    def __init__(self, seconds: float, weight: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._left = clock, weight
        self._end = clock() + seconds

    def part(self, weight: float = 1.0) -> float:
        """Seconds of the next part: its share of those that are left, 0 if none are."""
        share = weight / max(self._left, weight)
        self._left -= weight
        return max(self._end - self._clock(), 0.0) * share
