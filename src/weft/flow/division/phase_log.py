"""PhaseLog: seconds of every phase while batches are prepared and trained, from several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from weft.core.division import PhaseTime
from weft.flow.division.sides import DeviceClock


class PhaseLog:
    """Seconds by phase; work of the trainer is measured between marks, which are read when they are needed."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._seconds: dict[str, list[float]] = {}
        self._marks: list[tuple[str, Any, Any]] = []

    def add(self, key: str, seconds: float) -> None:
        """One phase of one batch."""
        with self._lock:
            self._seconds.setdefault(key, []).append(seconds)

    def add_marks(self, key: str, begin: Any, end: Any) -> None:
        """One phase of one batch, as two marks."""
        with self._lock:
            self._marks.append((key, begin, end))

    def timed(self, key: str, work: Callable[[Any], Any], item: Any) -> Any:
        """``work(item)`` on the host's clock."""
        begin = time.perf_counter()
        result = work(item)
        self.add(key, time.perf_counter() - begin)
        return result

    def marked(self, key: str, work: Callable[[Any], Any], item: Any) -> Any:
        """``work(item)`` on the clock of the trainer."""
        begin = self._clock.mark()
        result = work(item)
        self.add_marks(key, begin, self._clock.mark())
        return result

    def seconds(self) -> dict[str, list[float]]:
        """All seconds by phase; waits for the marks."""
        with self._lock:
            marks, self._marks = self._marks, []
        for key, begin, end in marks:
            self.add(key, self._clock.seconds(begin, end))
        with self._lock:
            return {key: list(some) for key, some in self._seconds.items()}

    def times(self) -> dict[str, PhaseTime]:
        """Mean and variance by phase."""
        return {key: PhaseTime.of(some) for key, some in self.seconds().items()}

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._seconds, self._marks = {}, []
