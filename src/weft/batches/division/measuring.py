"""Calls in threads of their own: again and again while something else is measured, or once, all at the same time.

What is measured names its phase where it fails, as training does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weft.batches.division.preparers import DeviceClock, DeviceSide, HostSide
from weft.batches.sampler import SeedBatch
from weft.batches.source import named_failures
from weft.core.division import PhaseTime
from weft.core.errors import WeftError

if TYPE_CHECKING:
    from weft.batches.division.profiler import Profiled


@dataclass(frozen=True)
class Call:
    """One finished call: when it began, the seconds that it took, and how many its thread had made before."""

    begin: float
    seconds: float
    number: int


class Calls:
    """Finished calls of several threads; ``failed``: there may be no more of them."""

    def __init__(self) -> None:
        self._done: list[Call] = []
        self.failed = False

    def __len__(self) -> int:
        return len(self._done)

    def add(self, call: Call) -> None:
        """One more; called by any thread."""
        self._done.append(call)

    def seconds(self, since: float = 0.0, after: int = 0) -> list[float]:
        """Of the calls that began at ``since`` or later, without the first ``after`` of every thread."""
        return [one.seconds for one in list(self._done) if one.begin >= since and one.number >= after]

    def threads(self, after: int = 0) -> int:
        """How many threads have made more than ``after`` calls."""
        return sum(one.number == after for one in list(self._done))


@contextmanager
def background(works: Sequence[Callable[[], Any]]) -> Iterator[Calls]:
    """Every work again and again in a thread of its own; yields the finished calls. Errors come out at the end."""
    calls, errors, over = Calls(), list[BaseException](), threading.Event()

    def run(work: Callable[[], Any]) -> None:
        number = 0
        try:
            while not over.is_set():
                begin = time.perf_counter()
                work()
                calls.add(Call(begin, time.perf_counter() - begin, number))
                number += 1
        except BaseException as error:
            errors.append(error)
            calls.failed = True

    threads = _started(run, works)
    try:
        yield calls
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def all_at_once(here: Callable[[], Any], works: Sequence[Callable[[], Any]]) -> tuple[Any, list[Any]]:
    """``here()`` in this thread and every work in one of its own, at the same time; results when all are done."""
    results, errors = list[Any](), list[BaseException]()

    def run(work: Callable[[], Any]) -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    threads = _started(run, works)
    try:
        mine = here()
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return mine, results


def _started(run: Callable[[Callable[[], Any]], None], works: Sequence[Callable[[], Any]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=run, args=(work,), name="weft-profile", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


# ---- failures ------------------------------------------------------------------------------------------


def with_named_failures(what: Profiled) -> Profiled:
    """The same, with a :class:`TrainingError` for whatever else a phase raises, memory that runs out apart."""
    host = None if what.host is None else _NamedHost(what.host)
    device = None if what.device is None else _NamedDevice(what.device, what.trainer)
    alone = None if what.alone is None else _named(f"step_{what.trainer}", what.alone)
    return replace(what, host=host, device=device, train=_named(f"training_{what.trainer}", what.train), alone=alone)


def _phase(name: str) -> AbstractContextManager[None]:
    return named_failures(f"phase '{name}' failed while it was measured", besides=(WeftError,))


def _named(phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        with _phase(phase):
            return work(*given)

    return run


class _NamedHost:
    def __init__(self, inner: HostSide) -> None:
        self._inner = inner

    def prepare(self, seeds: SeedBatch) -> Any:
        with _phase("batching_cpu"):
            return self._inner.prepare(seeds)

    def transfer(self, item: Any) -> Any:
        with _phase("transfer_pcie"):
            return self._inner.transfer(item)

    def discard(self, item: Any) -> None:
        self._inner.discard(item)


class _NamedDevice:
    def __init__(self, inner: DeviceSide, name: str) -> None:
        self._inner, self._name = inner, name

    def batch(self, seeds: SeedBatch) -> Any:
        with _phase(f"batching_{self._name}"):
            return self._inner.batch(seeds)

    def read(self, item: Any) -> Any:
        with _phase(f"transfer_{self._name}"):
            return self._inner.read(item)


# ---- PhaseLog: seconds of every phase while batches are prepared and trained, from several threads.


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


# ---- TimeLimit: divide the seconds of a measurement among its parts, so that the whole ends in time.


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
