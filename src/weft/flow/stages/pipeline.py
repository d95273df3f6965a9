"""Pipeline: a list of stages, each with a thread of its own and a bounded queue behind it.

    batches = Pipeline([Stage("sample", sample), Stage("fetch", fetch), Stage("transfer", transfer)], depth=3)
    for batch in batches.run(order.epochs(10)):
        train(batch)

Items leave in the order of the source. ``depth=1`` is synchronous: every item passes all stages in the caller's thread
before the next one begins. A deeper pipeline keeps at most ``depth`` finished items per stage and one in work. The
results are the same, because a stage's work depends on its item alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weft.core.errors import InputError, TrainingError
from weft.flow.failures import failure, is_memory_error, named_failures
from weft.flow.stages.channel import Channel, Closed
from weft.flow.stages.pace import Pace
from weft.flow.stages.streams import arrived
from weft.flow.stages.workers import Workers

JOIN_SECONDS = 5.0  # for a stage that is still at work when the pipeline is closed
_END = object()  # of a source


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline: ``work(item)`` returns the next stage's item.

    ``workers`` threads share the items; results keep their order.
    """

    name: str
    work: Callable[[Any], Any]
    workers: int = 1


@dataclass
class StageReport:
    """What a stage has done: items, seconds at work, times it was held back, and the longest queue behind it."""

    name: str
    items: int = 0
    busy_seconds: float = 0.0
    held_back: int = 0
    longest_queue: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, seconds: float) -> None:
        """Count one item."""
        with self._lock:
            self.items += 1
            self.busy_seconds += seconds


class Pipeline:
    """Stages that run at the same time on different items; see the module."""

    def __init__(self, stages: Sequence[Stage], depth: int = 2, high_water: int | None = None) -> None:
        if depth < 1:
            raise InputError(f"pipeline depth={depth} must be at least 1 (synchronous)")
        if not stages or len({stage.name for stage in stages}) != len(stages):
            raise InputError(f"a pipeline needs stages with different names, not {[s.name for s in stages]}")
        if high_water is not None and not 1 <= high_water <= depth:
            raise InputError(f"high_water={high_water} must be from 1 to the depth {depth}")
        self.stages, self.depth = tuple(stages), depth
        self.high_water = high_water or depth
        self.reports = [StageReport(stage.name) for stage in stages]

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """The items of ``source`` after all stages.

        An error in a stage, or in the source, is raised here as a TrainingError that names the stage; memory that ran
        out is raised as it is. Leaving the loop early (or closing the iterator) stops all threads.
        """
        return self._synchronous(source) if self.depth == 1 else self._overlapped(source)

    def _synchronous(self, source: Iterable[Any]) -> Iterator[Any]:
        for number, item in enumerate(named_errors(source)):
            for stage, report in zip(self.stages, self.reports, strict=True):
                item = _timed(stage, report, item, number)
            yield arrived(item)
            del item  # the consumer decides how long it lives

    def _overlapped(self, source: Iterable[Any]) -> Iterator[Any]:
        running = _Running(self, source)
        try:
            yield from running.results()
        finally:
            running.stop()


def named_errors(source: Iterable[Any]) -> Iterator[Any]:
    """The items of the source, its errors named like a stage's."""
    items, number = iter(source), 0
    while True:
        with named_failures(_failed("source", number)):
            item = next(items, _END)
        if item is _END:
            return
        yield item
        number += 1


def _failed(stage: str, number: int) -> str:
    return f"stage '{stage}' failed at item {number}"


def _timed(stage: Stage, report: StageReport, item: Any, number: int) -> Any:
    """One item through one stage; an error names the stage, unless memory ran out."""
    start = time.perf_counter()
    with named_failures(_failed(stage.name, number)):
        result = stage.work(item)
    report.add(time.perf_counter() - start)
    return result


class _Running:
    """The threads and queues of one run."""

    def __init__(self, pipeline: Pipeline, source: Iterable[Any]) -> None:
        self._pipeline, self._lock = pipeline, threading.Lock()
        self._error: BaseException | None = None
        self._channels = [Channel(pipeline.depth) for _ in range(len(pipeline.stages) + 1)]
        self._pools = [Workers(s.workers, f"weft-{s.name}") if s.workers > 1 else None for s in pipeline.stages]
        targets = [("source", lambda: self._feed(source))]
        targets += [(s.name, lambda place=i: self._work(place)) for i, s in enumerate(pipeline.stages)]
        self._threads = [
            threading.Thread(target=self._guard, args=(work, i), name=f"weft-{name}", daemon=True)
            for i, (name, work) in enumerate(targets)
        ]
        for thread in self._threads:
            thread.start()

    def results(self) -> Iterator[Any]:
        """Finished items; raises the first error at once, even if finished items are waiting."""
        try:
            while True:
                yield self._result()
        except Closed:
            if self._error is not None:
                raise self._error from self._error.__cause__

    def _result(self) -> Any:
        """The next finished item; raises Closed when there is none, and when a stage has failed."""
        item = self._channels[-1].take()
        try:
            return arrived(_settled(item))
        except Exception as error:
            self._fail(error)
            raise Closed from None

    def stop(self) -> None:
        """Close all queues, drop what is in them and wait for the threads."""
        for channel in self._channels:
            channel.close(drop=True)
        for pool in self._pools:
            if pool is not None:
                pool.stop()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        for report, channel in zip(self._pipeline.reports, self._channels[1:], strict=True):
            report.longest_queue = max(report.longest_queue, channel.longest)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        for channel in self._channels:
            channel.close(drop=True)

    def _guard(self, work: Callable[[], None], place: int) -> None:
        """A thread's whole life: work, then close the queue behind it, or report its error."""
        try:
            work()
        except Closed:
            pass
        except TrainingError as error:
            self._fail(error)
        except BaseException as error:
            stages = ["source", *(stage.name for stage in self._pipeline.stages)]
            done = self._pipeline.reports[place - 1].items if place else 0
            self._fail(error if is_memory_error(error) else failure(_failed(stages[place], done), error))
        self._channels[place].close()

    def _feed(self, source: Iterable[Any]) -> None:
        for item in named_errors(source):
            self._channels[0].put(item)

    def _work(self, place: int) -> None:
        stage, report, pool = self._pipeline.stages[place], self._pipeline.reports[place], self._pools[place]
        before, behind = self._channels[place], self._channels[place + 1]
        pace, number = Pace(self._pipeline.high_water), 0
        while True:
            # Wait for a free place before the work, not after it: an item in work owns memory too.
            behind.wait_below(pace.limit(len(behind)))
            report.held_back = pace.held_back
            # No variable holds an item: while the stage waits, the queues alone keep batches alive.
            if pool is None:
                behind.put(_timed(stage, report, _settled(before.take()), number))
            else:
                behind.put(pool.submit(partial(self._by_worker, stage, report, before.take(), number)))
            number += 1

    def _by_worker(self, stage: Stage, report: StageReport, item: Any, number: int) -> Any:
        try:
            return _timed(stage, report, _settled(item), number)
        except Exception as error:
            self._fail(error)  # at once, not when the next stage comes to this item
            raise


def _settled(item: Any) -> Any:
    """The item itself; the result of one that a worker is still making."""
    return item.result() if isinstance(item, Future) else item
