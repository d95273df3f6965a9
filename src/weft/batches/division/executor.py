"""DividedPipeline: the batches of an epoch, prepared by host threads and by the trainer as a division says.

    pipeline = DividedPipeline(division, host, device)
    for batch in pipeline.run(order.epoch(0)):
        train(batch)

Workers prepare the host's batches, one thread copies them over the bus, and the caller's thread prepares the device's
own between two steps, as :class:`weft.core.division.DualBuffer` decides. Batches come in their order and depend on
their seeds alone. ``division`` may be replaced between two runs. If the batches of the next epoch are given (``then``),
the host of an elastic division begins those as this epoch ends; they wait in its buffer until the next run.
:meth:`DividedPipeline.close` ends that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from weft.batches.division.preparers import Clock, DevicePreparer, HostClock, HostPreparer
from weft.batches.pipeline import arrived
from weft.batches.sampler import SeedBatch
from weft.batches.source import failure, is_memory_error, named_failures
from weft.core.division import Division, DualBuffer, State
from weft.core.errors import InputError, TrainingError

AHEAD = 2  # actions that may be submitted to the trainer before the first of them is done
JOIN_SECONDS = 5.0
IDLE_SECONDS = 30.0  # between two epochs after which batches of the next one are dropped
PREPARE, TRANSFER = "batching_cpu", "transfer_pcie"


class DividedPipeline:
    """Prepares batches as ``division`` says; ``prepared`` counts them by side.

    ``inside``: what the trainer gets in place of a prepared batch if the step of an elastic division prepares it; such
    steps are a phase of their own, ``step``. None: the device prepares it right before the step. ``log``: a list for
    benchmarks and tests, to which every phase is appended with its clock and the marks of its begin and end.
    """

    def __init__(
        self,
        division: Division,
        host: HostPreparer | None,
        device: DevicePreparer | None,
        clock: Clock | None = None,
        inside: Callable[[SeedBatch], Any] | None = None,
    ) -> None:
        self.host, self.device, self.inside = host, device, inside
        self.clock = clock or HostClock()
        self.log: list[tuple[str, Clock, Any, Any]] | None = None
        self.prepared = {"host": 0, "device": 0, "taken over": 0}
        self.seconds: dict[str, float] = {}  # of phases, for the next run of an elastic division
        self._running: _Running | None = None
        self.division = division

    @property
    def division(self) -> Division:
        """How batches are divided from the next run on."""
        return self._division

    @division.setter
    def division(self, division: Division) -> None:
        for count, preparer, name in (
            (division.host_batches, self.host, "host"),
            (division.device_batches, self.device, division.trainer),
        ):
            if count and preparer is None:
                raise InputError(f"division: the {name} is to prepare {count} batches of an overlap, but it cannot")
        self._division = division

    def run(self, source: Iterable[SeedBatch], then: Iterable[SeedBatch] = ()) -> Iterator[Any]:
        """The batches of ``source`` where they are trained; ``then``: those of the next run, if there will be one.

        An error of a side is raised here as a TrainingError that names the phase; memory that ran out is raised as it
        is. Leaving the loop early stops all threads.
        """
        seeds, upcoming = list(source), list(then) if self.division.elastic else []
        if self._running is None or not self._running.follow(self.division, seeds, upcoming):
            self.close()
            self._running = _Running(self, seeds, upcoming)
        running = self._running
        schedule, continues = running.schedule, False  # of this run: another may follow before this one is closed
        try:
            yield from running.batches()
            continues = schedule.upcoming > 0
        finally:
            by_device = sum(map(schedule.prepared_by_device, range(schedule.batches)))
            self.prepared["device"] += by_device
            self.prepared["host"] += schedule.batches - by_device
            self.prepared["taken over"] += schedule.taken_over
            if running.schedule is schedule:
                if schedule.assignment is not None:
                    self.seconds = schedule.assignment.seconds
                if not continues:
                    running.stop()
                    self._running = None if self._running is running else self._running

    def close(self) -> None:
        """End all threads, and drop what they have begun."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No other thread works inside: while a CUDA graph is captured, none may call CUDA."""
        with nullcontext() if self._running is None else self._running.paused():
            yield


class _Running:
    """The threads, the schedule and the items of one run, or of several; one condition guards what is shared.

    ``then``: the seeds that :meth:`follow` is expected to continue with. Threads and items number batches over all
    runs; the schedule numbers those of the present run, before which ``_before`` were trained.
    """

    def __init__(self, pipeline: DividedPipeline, seeds: Sequence[SeedBatch], then: Sequence[SeedBatch]) -> None:
        self._pipeline, self._seeds, self._then = pipeline, seeds, then
        self._division = division = pipeline.division
        self._before = 0
        self.schedule = DualBuffer(division, len(seeds), pipeline.seconds, len(then))
        self._changed, self._items = threading.Condition(), dict[int, Any]()
        self._error: BaseException | None = None
        self._stopped = self._paused = False
        self._at_work = 0  # threads that have begun something
        # Actions of the trainer: the marks after and before each, and the phase of a training step.
        self._submitted: deque[tuple[Any, Any, str]] = deque()
        keys = [PREPARE] * division.workers + [TRANSFER] if division.host_batches and seeds else []
        names = {PREPARE: "weft-prepare", TRANSFER: "weft-transfer"}
        self._threads = [threading.Thread(target=self._work, args=(key,), name=names[key], daemon=True) for key in keys]
        for thread in self._threads:
            thread.start()

    def follow(self, division: Division, seeds: Sequence[SeedBatch], then: Sequence[SeedBatch]) -> bool:
        """Continue with ``seeds`` if they were announced and the division is the same; returns whether it does."""
        with self._changed:
            same = [(batch.epoch, batch.batch) for batch in seeds] == [(each.epoch, each.batch) for each in self._then]
            if self._stopped or not self.schedule.finished or not same or division != self._division:
                return False
            self._before += self.schedule.batches
            self._seeds, self._then = seeds, then
            self.schedule = self.schedule.following(len(then))
            self._changed.notify_all()
        return True

    # ---- the thread that trains

    def batches(self) -> Iterator[Any]:
        """Batch after batch; the seconds until the next one is requested are those of training."""
        clock, trainer = self._pipeline.clock, self._division.trainer
        inside = self._pipeline.inside if self._division.elastic else None
        for _ in self._seeds:
            prepared = None  # mark in front of what the device has prepared for this step
            while True:
                # Decide from where the work is, not from how far the host has run ahead of it.
                while len(self._submitted) >= AHEAD:
                    end, begin, phase = self._submitted.popleft()
                    seconds = clock.seconds(begin, end)
                    if phase and self.schedule.assignment is not None:
                        self._took(phase, seconds)
                action, batch = self._decide()
                if action == "train":
                    break
                if inside is not None:
                    self._done(self._before + batch, inside(self._seeds[batch]))
                else:
                    prepared = self._prepare_on_device(batch)
            item = self._items.pop(self._before + batch)
            own = inside is not None and self.schedule.prepared_by_device(batch)
            begin = clock.mark()
            yield arrived(item)
            del item  # the consumer decides how long it lives
            end = clock.mark()
            phase = "given" if prepared is None and not own else "own"
            self._submitted.append((end, begin if prepared is None else prepared, phase))
            self._log(f"step_{trainer}" if own else f"training_{trainer}", clock, begin, end)

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

    def _prepare_on_device(self, batch: int) -> Any:
        """Prepare in this thread; returns the mark in front of it."""
        device, clock, trainer = self._pipeline.device, self._pipeline.clock, self._division.trainer
        marks, item = [clock.mark()], self._seeds[batch]
        with named_failures(f"phase 'batching_{trainer}' failed at batch {batch}"):
            for phase, work in (("batching", device.batch), ("transfer", device.read)):
                item = work(item)
                marks.append(clock.mark())
                self._log(f"{phase}_{trainer}", clock, *marks[-2:])
        self._submitted.append((marks[-1], marks[0], ""))
        self._done(self._before + batch, item)
        return marks[0]

    # ---- the host's threads

    def _work(self, key: str) -> None:
        """The life of a thread that prepares or transfers batches; an error ends the run."""
        try:
            while (number := self._claim(key)) is not None:
                try:
                    # Prepare or transfer one batch.
                    host = self._pipeline.host
                    with self._changed:
                        batch = number - self._before
                        seeds = self._seeds[batch] if batch < len(self._seeds) else self._then[batch - len(self._seeds)]
                        item = seeds if key == PREPARE else self._items.pop(number)
                        self._changed.notify_all()  # there may be room in the host's buffer now
                    begin = time.perf_counter()
                    try:
                        with named_failures(f"phase '{key}' failed at batch {seeds.batch}"):
                            made = host.prepare(seeds) if key == PREPARE else host.transfer(item)
                        end = time.perf_counter()
                        self._log(key, HostClock(), begin, end)
                        self._took("host" if key == PREPARE else "bus", end - begin)
                        self._done(number, made)
                    finally:
                        if key == TRANSFER:
                            host.discard(item)
                finally:
                    with self._changed:
                        self._at_work -= 1
                        self._changed.notify_all()
        except BaseException as error:
            named = isinstance(error, TrainingError) or is_memory_error(error)
            with self._changed:
                self._error = self._error or (error if named else failure("phase 'host' failed at batch 0", error))
                self._changed.notify_all()

    def _claim(self, key: str) -> int | None:
        """The number of the next batch of a thread; None when there will be none."""
        with self._changed:
            while not self._stopped and self._error is None:
                schedule = self.schedule
                if not self._paused:
                    batch = schedule.begin_on_host() if key == PREPARE else schedule.begin_transfer()
                    if batch is not None:
                        self._at_work += 1
                        return self._before + batch
                    over = schedule.finished if key == TRANSFER else not schedule.host_has_work
                    if over and not self._then:
                        return None
                in_time = self._changed.wait(IDLE_SECONDS)
                if not in_time and self.schedule.finished and not self._paused:  # the next epoch does not come
                    self._stopped = True
                    self._changed.notify_all()
                    self._drop_items()
        return None

    def _log(self, phase: str, clock: Clock, begin: Any, end: Any) -> None:
        if self._pipeline.log is not None:
            self._pipeline.log.append((phase, clock, begin, end))

    def _took(self, phase: str, seconds: float) -> None:
        with self._changed:
            self.schedule.took(phase, seconds)

    def _done(self, number: int, item: Any) -> None:
        with self._changed:
            self._items[number] = item
            self.schedule.complete(number - self._before)
            if self._stopped:
                self._drop_items()
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
        for number in list(self._items):
            state = self.schedule.state(number - self._before)
            if state not in (State.ON_BUS, State.TRAINED):
                item = self._items.pop(number)
                if state is State.IN_HOST_BUFFER and self._pipeline.host is not None:
                    self._pipeline.host.discard(item)
