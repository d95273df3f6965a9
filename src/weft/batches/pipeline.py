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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from threading import Condition
from typing import Any

import torch
from torch import Tensor

from weft.batches.block import MiniBatch, Subgraph, exact_device
from weft.batches.features import FeatureStore
from weft.batches.sampler import NeighbourSampler, SeedBatch
from weft.batches.source import failure, is_memory_error, named_failures
from weft.core.errors import InputError, TrainingError

# ---- Queues between stages, and their pace.


class Closed(Exception):
    """The channel was closed, and for a reader it is also empty."""


class Channel:
    """A bounded queue of at most ``depth`` items; ``longest`` is the most it ever held.

    Unlike with ``queue.Queue``, closing wakes all waiting threads at once, so a shutdown needs no timeouts.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self.longest = depth, 0
        self._items: deque[Any] = deque()
        self._changed = Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any) -> None:
        """Add an item, waiting while the channel is full; raises Closed once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self.depth)
            if self._closed:
                raise Closed
            self._items.append(item)
            self.longest = max(self.longest, len(self._items))
            self._changed.notify_all()

    def take(self) -> Any:
        """The oldest item, waiting while there is none; raises Closed when no more can come."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            if not self._items:
                raise Closed
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def wait_below(self, length: int) -> None:
        """Wait until fewer than ``length`` items are queued; raises Closed once the channel is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < length)
            if self._closed:
                raise Closed

    def close(self, drop: bool = False) -> None:
        """No more items; ``drop`` also discards those that are queued."""
        with self._changed:
            self._closed = True
            if drop:
                self._items.clear()
            self._changed.notify_all()


class Pace:
    """Limits the queue behind a stage to ``high_water`` items, and to half of that after ``patience`` growing items.

    TurboGNN's runtime monitoring: a queue that has grown for several items in a row means that the next stage cannot
    keep up, so the stage in front of it is held back until the queue has drained.
    """

    def __init__(self, high_water: int, patience: int = 5) -> None:
        self.high_water, self.patience = high_water, patience
        self.held_back = 0
        self._seen: deque[int] = deque(maxlen=patience + 1)
        self._slow = False

    def limit(self, length: int) -> int:
        """The stage may begin an item once its queue is shorter than this; ``length`` is the queue's length now."""
        self._seen.append(length)
        seen = list(self._seen)
        growing = len(seen) == self.patience + 1 and all(a < b for a, b in pairwise(seen))
        half = max(self.high_water // 2, 1)
        self._slow = growing or (self._slow and length > half)
        limit = half if self._slow else self.high_water
        self.held_back += length >= limit
        return limit


# ---- Work on a CUDA stream of its own, and in threads.


@dataclass(frozen=True)
class OnDevice:
    """An item whose tensors another stream is still writing; ``ready`` is recorded behind that work."""

    item: Any
    ready: torch.cuda.Event


def arrived(item: Any, stream: torch.cuda.Stream | None = None) -> Any:
    """The item itself, once ``stream`` (the current one if None) waits for the work that makes it.

    Its tensors are marked as used by that stream, so that their memory is not reused while it reads them.
    """
    if not isinstance(item, OnDevice):
        return item
    stream = stream or torch.cuda.current_stream()
    stream.wait_event(item.ready)
    _mark_used(item.item, stream)
    return item.item


def _mark_used(item: Any, stream: torch.cuda.Stream) -> None:
    """Keep the memory of ``item`` from being reused before ``stream`` has read it."""
    if isinstance(item, Tensor):
        if item.is_cuda:
            item.record_stream(stream)
        return
    for part in item if isinstance(item, (tuple, list)) else item.tensors() if hasattr(item, "tensors") else ():
        _mark_used(part, stream)


def on_stream(work: Callable[[Any], Any], device: torch.device) -> Callable[[Any], Any]:
    """``work`` on a stream of its own; on the CPU, ``work`` itself."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # what the stage reads may still be on its way there

    def run(item: Any) -> OnDevice:
        if not isinstance(item, OnDevice):  # made on the caller's stream, which may still be writing it
            stream.wait_stream(torch.cuda.current_stream(device))
            _mark_used(item, stream)
        with torch.cuda.stream(stream):
            result = work(arrived(item, stream))
            ready = torch.cuda.Event()
            ready.record(stream)
        return OnDevice(result, ready)

    return run


JOIN_SECONDS = 5.0  # for a stage that is still at work when the pipeline is closed
_END = object()  # of a source


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline: ``work(item)`` returns the next stage's item."""

    name: str
    work: Callable[[Any], Any]


@dataclass
class StageReport:
    """What a stage has done: items, seconds at work, times it was held back, and the longest queue behind it."""

    name: str
    items: int = 0
    busy_seconds: float = 0.0
    held_back: int = 0
    longest_queue: int = 0


class Pipeline:
    """Stages that run at the same time on different items; see the module."""

    def __init__(self, stages: Sequence[Stage], depth: int = 2) -> None:
        if depth < 1:
            raise InputError(f"pipeline depth={depth} must be at least 1 (synchronous)")
        if not stages or len({stage.name for stage in stages}) != len(stages):
            raise InputError(f"a pipeline needs stages with different names, not {[s.name for s in stages]}")
        self.stages, self.depth = tuple(stages), depth
        self.reports = [StageReport(stage.name) for stage in stages]

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """The items of ``source`` after all stages.

        An error in a stage, or in the source, is raised here as a TrainingError that names the stage; memory that ran
        out is raised as it is. Leaving the loop early (or closing the iterator) stops all threads.
        """
        if self.depth > 1:
            running = _Running(self, source)
            try:
                yield from running.results()
            finally:
                running.stop()
            return
        for number, item in enumerate(named_errors(source)):
            for stage, report in zip(self.stages, self.reports, strict=True):
                item = _timed(stage, report, item, number)
            yield arrived(item)
            del item  # the consumer decides how long it lives


def named_errors(source: Iterable[Any]) -> Iterator[Any]:
    """The items of the source, its errors named like a stage's."""
    items, number = iter(source), 0
    while True:
        with named_failures(f"stage 'source' failed at item {number}"):
            item = next(items, _END)
        if item is _END:
            return
        yield item
        number += 1


def _timed(stage: Stage, report: StageReport, item: Any, number: int) -> Any:
    """One item through one stage; an error names the stage, unless memory ran out."""
    start = time.perf_counter()
    with named_failures(f"stage '{stage.name}' failed at item {number}"):
        result = stage.work(item)
    report.items += 1
    report.busy_seconds += time.perf_counter() - start
    return result


class _Running:
    """The threads and queues of one run."""

    def __init__(self, pipeline: Pipeline, source: Iterable[Any]) -> None:
        self._pipeline, self._lock = pipeline, threading.Lock()
        self._error: BaseException | None = None
        self._channels = [Channel(pipeline.depth) for _ in range(len(pipeline.stages) + 1)]
        names = ["source", *(stage.name for stage in pipeline.stages)]
        self._threads = [
            threading.Thread(target=self._run, args=(position, name, source), name=f"weft-{name}", daemon=True)
            for position, name in enumerate(names)
        ]
        for thread in self._threads:
            thread.start()

    def results(self) -> Iterator[Any]:
        """Finished items; raises the first error at once, even if finished items are waiting."""
        while True:
            try:
                item = arrived(self._channels[-1].take())
            except Closed:
                break
            yield item
            del item  # the consumer decides how long it lives
        if self._error is not None:
            raise self._error from self._error.__cause__

    def stop(self) -> None:
        """Close all queues, drop what is in them and wait for the threads."""
        for channel in self._channels:
            channel.close(drop=True)
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

    def _run(self, position: int, name: str, source: Iterable[Any]) -> None:
        """A thread's whole life: read the source or work, then close the queue behind it, or report its error."""
        try:
            if position:
                self._work(position - 1)
            else:
                for item in named_errors(source):
                    self._channels[0].put(item)
        except Closed:
            pass
        except BaseException as error:
            done = self._pipeline.reports[position - 1].items if position else 0
            named = isinstance(error, TrainingError) or is_memory_error(error)
            self._fail(error if named else failure(f"stage '{name}' failed at item {done}", error))
        self._channels[position].close()

    def _work(self, number_of_stage: int) -> None:
        stage, report = self._pipeline.stages[number_of_stage], self._pipeline.reports[number_of_stage]
        before, behind = self._channels[number_of_stage : number_of_stage + 2]
        pace = Pace(self._pipeline.depth)
        for number in count():
            # Wait for a free place before the work, not after it: an item in work owns memory too.
            behind.wait_below(pace.limit(len(behind)))
            report.held_back = pace.held_back
            # No variable holds an item: while the stage waits, the queues alone keep batches alive.
            behind.put(_timed(stage, report, before.take(), number))


def training_stages(
    sampler: NeighbourSampler,
    store: FeatureStore,
    labels: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> list[Stage]:
    """From a :class:`SeedBatch` to a batch on ``device`` with features and labels ``[N]`` or ``[N, C]``.

    On a GPU each stage has its own stream.
    """
    device = exact_device(device)

    def sample(seeds: SeedBatch) -> MiniBatch | Subgraph:
        return sampler.sample(seeds.seeds, seeds.epoch, seeds.batch)

    def fetch(batch: MiniBatch | Subgraph) -> MiniBatch | Subgraph:
        y = None if labels is None else labels[batch.seeds.to(labels.device).long()]
        return batch.with_data(store.read(batch.input_nodes), y)

    def transfer(batch: MiniBatch | Subgraph) -> MiniBatch | Subgraph:
        return batch.to(device, non_blocking=True)

    return [
        Stage("sample", on_stream(sample, sampler.device)),
        Stage("fetch", on_stream(fetch, store.device)),
        Stage("transfer", on_stream(transfer, device)),
    ]
