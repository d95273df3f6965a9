"""DividedPipeline: batches of an epoch, prepared by host threads and by the trainer as a division says.

    pipeline = DividedPipeline(division, host, device)
    for batch in pipeline.run(order.epoch(0)):
        train(batch)

Workers prepare the host's batches, one thread carries them over the bus, and the caller's thread prepares the
device's own between two steps, as :class:`weft.core.division.DualBuffer` decides. Batches come in their order and
depend on their seeds alone, whoever prepares them. ``division`` may be replaced between two runs. Told the batches of
the epoch after this one (``then``), the host of an elastic division goes on with those as this one ends; they wait in
its buffer until the next run, while the caller evaluates, say. :meth:`DividedPipeline.close` ends that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.batches.division.measuring import PhaseLog
from weft.batches.division.preparers import DeviceClock, DeviceSide, HostClock, HostSide
from weft.batches.pipeline import arrived
from weft.batches.sampler import SeedBatch
from weft.batches.source import failure, is_memory_error, named_failures
from weft.core.division import Division, DualBuffer, State
from weft.core.errors import InputError, TrainingError

Finished = Callable[[DualBuffer, int], None]
AHEAD = 2  # actions that may be submitted to the trainer before the first of them is done
JOIN_SECONDS = 5.0
CLAIMED = (State.ON_BUS, State.TRAINED)  # a thread is about to take the item, or has
IDLE_SECONDS = 30.0  # between two epochs after which batches of the next one are given up


class DividedPipeline:
    """Prepares batches as ``division`` says; ``log`` has the seconds of every phase, ``prepared`` who did how many.

    ``inside``: what the trainer is given in place of a prepared batch if its step prepares it (``in_step``); the
    seconds of such steps are those of a phase of its own, ``step``. None: the device prepares it right before.
    """

    def __init__(
        self,
        division: Division,
        host: HostSide | None,
        device: DeviceSide | None,
        clock: DeviceClock | None = None,
        inside: Callable[[SeedBatch], Any] | None = None,
    ) -> None:
        self.host, self.device, self.inside = host, device, inside
        self.clock = clock or HostClock()
        self.log = PhaseLog(self.clock)
        self.prepared = {"host": 0, "device": 0, "taken over": 0}
        self._running: _Running | None = None
        self._seconds: dict[str, float] = {}  # of phases, for the next run of an elastic division
        self.division = division

    @property
    def division(self) -> Division:
        """How batches are divided from the next run on."""
        return self._division

    @division.setter
    def division(self, division: Division) -> None:
        for count, side, name in (
            (division.host_batches, self.host, "host"),
            (division.device_batches, self.device, division.trainer),
        ):
            if count and side is None:
                raise InputError(f"division: the {name} is to prepare {count} batches of an overlap, but it cannot")
        self._division = division

    def run(self, source: Iterable[SeedBatch], then: Iterable[SeedBatch] = ()) -> Iterator[Any]:
        """The batches of ``source`` where they are trained; ``then``: those of the next run, if there will be one.

        An error of a side is raised here as a TrainingError that names the phase; memory that ran out is raised as it
        is. Leaving the loop early stops all threads.
        """
        running = self._begun(list(source), list(then) if self.division.elastic else [])
        schedule, goes_on = running.schedule, False  # of this run: another may follow before this one is closed
        try:
            yield from running.batches()
            goes_on = schedule.upcoming > 0
        finally:
            self._count(schedule)
            mine = running.schedule is schedule
            if mine and schedule.claims is not None:
                self._seconds = schedule.claims.seconds
            if mine and not goes_on:
                running.stop()
                self._running = None if self._running is running else self._running

    def _begun(self, seeds: list[SeedBatch], then: list[SeedBatch]) -> _Running:
        """The run of ``seeds``: the one before goes on if it was told of them, or another begins."""
        if self._running is None or not self._running.follow(self.division, seeds, then):
            self.close()
            self._running = _Running(self, seeds, then)
        return self._running

    def close(self) -> None:
        """End all threads, and drop what they have begun."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No other thread is at work inside: while a CUDA graph is captured, none may call CUDA."""
        if self._running is None:
            yield
            return
        with self._running.paused():
            yield

    def _count(self, schedule: DualBuffer) -> None:
        for batch in range(schedule.batches):
            self.prepared["device" if schedule.prepared_by_device(batch) else "host"] += 1
        self.prepared["taken over"] += schedule.blocking.taken_over


class _Running:
    """The threads, the schedule and the items of one run, or of several; what is shared is under one condition.

    ``then``: what :meth:`follow` is expected to go on with. Threads and items know batches by numbers that count over
    all runs, the schedule by places in the present one, of which ``_before`` were trained in others.
    """

    def __init__(self, pipeline: DividedPipeline, seeds: Sequence[SeedBatch], then: Sequence[SeedBatch]) -> None:
        self._pipeline, self._seeds, self._then, self._log = pipeline, seeds, then, pipeline.log
        self._division = division = pipeline.division
        self._before = 0
        self.schedule = DualBuffer(division, len(seeds), pipeline._seconds, len(then))
        self._keys = _Keys.of(division.trainer)
        self._changed, self._items = threading.Condition(), dict[int, Any]()
        self._error: BaseException | None = None
        self._stopped = self._paused = False
        self._at_work = 0  # threads that have begun something
        self._submitted: deque[_Submitted] = deque()  # actions of the trainer
        self._preparing: Any = None  # mark in front of what it has prepared and not trained on yet
        host = division.host_batches > 0 and bool(seeds)
        works = [("prepare", self._prepare)] * division.workers + [("transfer", self._transfer)] if host else []
        if division.beside and division.device_batches and seeds:
            works.append(("device", self._prepare_beside))
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"weft-{name}", daemon=True) for name, work in works
        ]
        for thread in self._threads:
            thread.start()

    def follow(self, division: Division, seeds: Sequence[SeedBatch], then: Sequence[SeedBatch]) -> bool:
        """Go on with ``seeds``, if they are what this was told of, under the same division; whether it does."""
        with self._changed:
            expected = division == self._division and _names(seeds) == _names(self._then)
            if self._stopped or not self.schedule.finished or not expected:
                return False
            self._before += self.schedule.batches
            self._seeds, self._then = seeds, then
            self.schedule = self.schedule.following(len(then))
            self._changed.notify_all()
        return True

    def _seeds_of(self, number: int) -> SeedBatch:
        place = number - self._before
        return self._seeds[place] if place < len(self._seeds) else self._then[place - len(self._seeds)]

    # ---- the thread that trains ----------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """Batch after batch; the seconds until the next one is asked for are those of training."""
        clock = self._pipeline.clock
        for _ in self._seeds:
            item, key = self._next()
            begin = clock.mark()
            yield arrived(item)
            del item  # the consumer decides how long it lives
            end = clock.mark()
            own, self._preparing = self._preparing, None
            phase = "given" if own is None and key != self._keys.step else "own"
            self._submitted.append(_Submitted(end, begin if own is None else own, phase))
            self._log.add_marks(key, begin, end)

    def _next(self) -> tuple[Any, str]:
        """The next batch, and the phase that training on it is."""
        inside = self._pipeline.inside if self._pipeline.division.in_step else None
        while True:
            self._keep_pace()
            what, batch = self._decide()
            if what == "train":
                own = inside is not None and self.schedule.prepared_by_device(batch)
                return self._items.pop(self._before + batch), self._keys.step if own else self._keys.training
            if inside is not None:
                self._done(self._before + batch, inside(self._seeds[batch]), DualBuffer.finished_on_device)
            else:
                self._prepare_here(batch)

    def _keep_pace(self) -> None:
        """Decide from where the work is, not from how far the host has run ahead of it."""
        clock = self._pipeline.clock
        while len(self._submitted) >= AHEAD:
            done = self._submitted.popleft()
            clock.wait(done.end)
            if self.schedule.claims is not None and done.begin is not None:
                self._took(done.phase, clock.seconds(done.begin, done.end))

    def _took(self, phase: str, seconds: float) -> None:
        with self._changed:
            self.schedule.took(phase, seconds)

    def _decide(self) -> tuple[str, int]:
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error from self._error.__cause__
                if self._stopped:
                    raise TrainingError("batches were closed before their epoch ended")
                action = self.schedule.next_on_device()
                if action is not None:
                    self.schedule.begin_on_device(*action)
                    self._changed.notify_all()
                    return action
                self._changed.wait()

    def _prepare_here(self, batch: int) -> None:
        device = self._pipeline.device
        assert device is not None
        self._preparing = self._pipeline.clock.mark() if self.schedule.claims is not None else None
        with named_failures(_failed(self._keys.batching, batch)):
            item = self._log.marked(self._keys.batching, device.batch, self._seeds[batch])
            item = self._log.marked(self._keys.reading, device.read, item)
        self._submitted.append(_Submitted(self._pipeline.clock.mark()))
        self._done(self._before + batch, item, DualBuffer.finished_on_device)

    def _prepare_beside(self) -> None:
        """The device's own batches in a thread of their own, while others are trained."""
        device = self._pipeline.device
        assert device is not None
        while (claimed := self._claim(self._begin_beside, lambda: not self.schedule.device_has_work)) is not None:
            number, seeds = claimed
            sampling = partial(self._log.timed, self._keys.batching, device.batch)
            reading = partial(self._log.timed, self._keys.reading, device.read)
            with self._working():
                item = self._attempt(seeds, sampling, seeds)
                self._done(number, self._attempt(seeds, reading, item), DualBuffer.finished_on_device)
                del item

    def _begin_beside(self) -> int | None:
        batch = self.schedule.next_beside()
        if batch is not None:
            self.schedule.begin_on_device("prepare", batch)
        return batch

    # ---- the host's threads --------------------------------------------------------------------------

    def _prepare(self) -> None:
        host = self._pipeline.host
        assert host is not None
        begin = lambda: self.schedule.begin_on_host()  # noqa: E731 - of whichever schedule there is by then
        over = lambda: not self._then and not self.schedule.host_has_work  # noqa: E731
        while (claimed := self._claim(begin, over)) is not None:
            number, seeds = claimed
            work = partial(self._log.timed, "batching_cpu", host.prepare)
            with self._working():
                self._run(number, seeds, work, seeds, DualBuffer.finished_on_host, "host")

    def _transfer(self) -> None:
        host = self._pipeline.host
        assert host is not None
        begin = lambda: self.schedule.begin_transfer()  # noqa: E731 - of whichever schedule there is by then
        while (claimed := self._claim(begin, lambda: self.schedule.finished and not self._then)) is not None:
            number, seeds = claimed
            work = partial(self._log.timed, "transfer_pcie", host.transfer)
            with self._working():
                with self._changed:
                    item = self._items.pop(number)
                    self._changed.notify_all()  # a place in the host's buffer is free
                try:
                    self._run(number, seeds, work, item, DualBuffer.finished_transfer, "bus")
                finally:
                    host.discard(item)
                    del item

    def _claim(self, begin: Callable[[], int | None], over: Callable[[], bool]) -> tuple[int, SeedBatch] | None:
        """The number of the next batch of a thread, and its seeds; None when there will be none."""
        with self._changed:
            while not self._stopped and self._error is None:
                place = None if self._paused else begin()
                if place is not None:
                    self._at_work += 1
                    return self._before + place, self._seeds_of(self._before + place)
                if not self._paused and over():
                    return None
                waited = not self._changed.wait(IDLE_SECONDS)
                if waited and self.schedule.finished and not self._paused:  # the next epoch does not come
                    self._give_up()
        return None

    def _give_up(self) -> None:
        self._stopped = True
        self._changed.notify_all()
        self._drop_items()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """What follows a claim; ended, another thread may count on it."""
        try:
            yield
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No thread begins anything inside, and what had begun is done."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: self._at_work == 0)
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def _run(
        self, number: int, seeds: SeedBatch, work: partial[Any], item: Any, finished: Finished, phase: str
    ) -> None:
        begin = time.perf_counter()
        made = self._attempt(seeds, work, item)
        self._took(phase, time.perf_counter() - begin)
        self._done(number, made, finished)

    def _attempt(self, seeds: SeedBatch, work: partial[Any], item: Any) -> Any:
        """``work(item)``; an error names the phase, which is the first argument of ``work``, unless memory ran out."""
        with named_failures(_failed(work.args[0], seeds.batch)):
            return work(item)

    def _done(self, number: int, item: Any, finished: Finished) -> None:
        with self._changed:
            self._items[number] = item
            finished(self.schedule, number - self._before)
            if self._stopped:
                self._drop_items()
            self._changed.notify_all()

    def _guard(self, work: Callable[[], None]) -> None:
        """A thread's whole life: an error ends the run."""
        try:
            work()
        except TrainingError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(error if is_memory_error(error) else failure(_failed("host", 0), error))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def stop(self) -> None:
        """End all threads and drop what they have made."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        with self._changed:
            self._drop_items()

    def _drop_items(self) -> None:
        """All but those that a thread has claimed and is about to take: it gives them back itself."""
        host, found = self._pipeline.host, {n: self.schedule.state(n - self._before) for n in self._items}
        for number, state in found.items():
            if state not in CLAIMED:
                item = self._items.pop(number)
                if host is not None and state is State.IN_HOST_BUFFER:
                    host.discard(item)


@dataclass(frozen=True)
class _Submitted:
    """An action of the trainer: the mark behind it, and of training the one before it, and whose batch it was on."""

    end: Any
    begin: Any = None
    phase: str = ""


@dataclass(frozen=True)
class _Keys:
    """Names of the phases on the hardware that trains."""

    batching: str
    reading: str
    training: str
    step: str

    @classmethod
    def of(cls, trainer: str) -> _Keys:
        return cls(*(f"{phase}_{trainer}" for phase in ("batching", "transfer", "training", "step")))


def _names(seeds: Sequence[SeedBatch]) -> list[tuple[int, int]]:
    return [(one.epoch, one.batch) for one in seeds]


def _failed(phase: str, batch: int) -> str:
    return f"phase '{phase}' failed at batch {batch}"
