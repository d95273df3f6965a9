"""Profile the phases of a batch: seconds of each alone and while others run, in a few seconds.

First every worker of the host prepares a batch that is not counted, all at the same time: it pins the buffer, touches
the tables of the sampler and compiles. Then each phase runs for some steps (20, or fewer if they take long) with
nothing else at work, and what can run at the same time is run at the same time: training and captured steps that
prepare their batch during copies, all workers of the host, and these during phases of the trainer and copies. All of it
ends at a limit, which the parts share. Pairs of phases that there is no time for get typical factors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import median
from types import SimpleNamespace
from typing import Any

from weft.batches.division.preparers import Clock, DevicePreparer, HostClock, HostPreparer
from weft.batches.pipeline import arrived
from weft.batches.sampler import SeedBatch
from weft.batches.source import named_failures
from weft.core.division import HOST_BATCHING, PhaseTime, PhaseTimes, SharedBus, typical
from weft.core.errors import WeftError

STEPS = 20
LIMIT_SECONDS = 15.0
FEWEST = 3  # steps of a part, however long they take
# Of the limit: batches of the host alone and of all its workers take long, the trainer's phases alone hardly vary, and
# the profiler waits for the end of the workers' last batches. During copies it is whole steps that matter most.
HOST_ALONE, CROWDED, LAST_BATCHES, WHOLE, COPYING = 4.0, 3.0, 1.5, 1.5, 2.0
LONGEST_ROUNDS = 8.0  # times the seconds of one worker alone that two batches of each of all workers may take
ROUNDS = 2.2  # times the seconds of a batch until every worker has begun one and finished it
TRANSFER = "transfer_pcie"


@dataclass(frozen=True)
class Profiled:
    """What to measure: both preparers (None: not there), a training step on an item, the hardware's name and clock.

    ``alone``: a whole step as the trainer does it if it prepares all batches: sampling, reading and training in one;
    None if that is no different.
    """

    host: HostPreparer | None
    device: DevicePreparer | None
    train: Callable[[Any], Any]
    trainer: str = "gpu"
    clock: Clock | None = None
    alone: Callable[[], Any] | None = None

    def with_named_failures(self) -> Profiled:
        """The same, with a :class:`TrainingError` for whatever else a phase raises, except memory that runs out."""

        def named(phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                with named_failures(f"phase '{phase}' failed while it was measured", besides=(WeftError,)):
                    return work(*arguments)

            return run

        host, device, alone, trainer = self.host, self.device, self.alone, self.trainer
        if host is not None:
            prepare, transfer = named(HOST_BATCHING, host.prepare), named(TRANSFER, host.transfer)
            host = SimpleNamespace(prepare=prepare, transfer=transfer, discard=host.discard)
        if device is not None:
            batch, read = named(f"batching_{trainer}", device.batch), named(f"transfer_{trainer}", device.read)
            device = SimpleNamespace(batch=batch, read=read)
        alone = None if alone is None else named(f"step_{trainer}", alone)
        return replace(self, host=host, device=device, train=named(f"training_{trainer}", self.train), alone=alone)


class TimeLimit:
    """``seconds`` for parts that together weigh ``weight``; what a part does not use goes to those after it."""

    def __init__(self, seconds: float, weight: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self.remaining = clock, weight
        self._end = clock() + seconds

    def part(self, weight: float = 1.0) -> float:
        """Seconds of the next part: its share of those that remain, 0 if none do."""
        share = weight / max(self.remaining, weight)
        self.remaining -= weight
        return max(self._end - self._clock(), 0.0) * share


@dataclass(frozen=True)
class Call:
    """One finished call: when it began, the seconds that it took, and how many its thread had made before."""

    begin: float
    seconds: float
    number: int


class Calls:
    """Finished calls of several threads; ``failed``: there may be no more of them."""

    def __init__(self) -> None:
        self.done: list[Call] = []
        self.failed = False

    def seconds(self, since: float = 0.0, after: int = 0) -> list[float]:
        """Of the calls that began at ``since`` or later, without the first ``after`` of every thread."""
        return [call.seconds for call in list(self.done) if call.begin >= since and call.number >= after]

    def threads(self, after: int = 0) -> int:
        """How many threads have made more than ``after`` calls."""
        return sum(call.number == after for call in list(self.done))

    def wait(self, enough: Callable[[], bool], limit: float) -> None:
        """Until ``enough()``, or ``limit`` seconds are over; in any case until the end of the first call."""
        deadline = time.monotonic() + limit
        while not self.failed and (not self.done or (not enough() and time.monotonic() < deadline)):
            time.sleep(0.002)


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
                calls.done.append(Call(begin, time.perf_counter() - begin, number))
                number += 1
        except BaseException as error:
            errors.append(error)
            calls.failed = True

    threads = [threading.Thread(target=run, args=(work,), name="weft-profile", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield calls
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def all_at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Every work in a thread of its own, at the same time; results when all are done."""
    with ThreadPoolExecutor(len(works), "weft-profile") as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def profile(
    what: Profiled, seeds: Sequence[SeedBatch], workers: int = 1, steps: int = STEPS, limit: float = LIMIT_SECONDS
) -> PhaseTimes:
    """Mean and variance of every phase over up to ``steps`` batches of ``seeds``, and how phases slow each other down.

    Takes at most about ``limit`` seconds, or a few steps of each phase if those take longer. ``train`` changes
    whatever it changes: the caller restores it.
    """
    return _Profiler(what, seeds, workers, steps, limit).run()


class _Profiler:
    def __init__(self, what: Profiled, seeds: Sequence[SeedBatch], workers: int, steps: int, limit: float) -> None:
        self._what, self._host, self._device = what, what.host, what.device
        self._workers, self._steps = workers, steps
        self._clock = what.clock or HostClock()
        self._seeds, self._seeds_lock = cycle(seeds), threading.Lock()
        self._phases: dict[str, PhaseTime] = {}
        self._interference: dict[str, dict[str, float]] = {}
        self._crowded = 0.0  # seconds of a batch of the host while all workers are at work
        self._bytes = 0
        self._captured: dict[str, PhaseTime] = {}
        self._inside: dict[str, dict[str, float]] = {}
        self._example: Any = None  # a batch where it is trained
        phases, whole = 1.0 if what.device is None else 3.0, float(what.alone is not None)
        weight = phases + whole * WHOLE
        if what.host is not None:
            weight += 2.0 + HOST_ALONE + CROWDED + phases + COPYING + LAST_BATCHES + whole * COPYING
        self._limit = TimeLimit(limit, weight)

    def run(self) -> PhaseTimes:
        """Everything that there is to measure; first what no division can be chosen without."""
        item = None if self._host is None else self._warm_host(self._host)
        # The phases of the trainer by name, each as a call.
        device, trainer, alone = self._device, self._what.trainer, {}
        if device is not None:
            sampled = device.batch(self._next_seeds())
            self._example = device.read(sampled)
            alone[f"batching_{trainer}"] = lambda: device.batch(self._next_seeds())
            alone[f"transfer_{trainer}"] = lambda: device.read(sampled)
        example = arrived(self._example)
        alone[f"training_{trainer}"] = lambda: self._what.train(example)
        for key, work in alone.items():
            self._phases[key] = PhaseTime.of(self._repeated(work, self._limit.part()))
        if self._what.alone is not None:
            # Its phases: training and reading take as long as alone, sampling takes the rest.
            whole = PhaseTime.of(self._repeated(self._what.alone, self._limit.part(WHOLE)))
            rest = whole.mean
            for phase in ("training", "transfer"):
                key = f"{phase}_{self._what.trainer}"
                taken = min(self._phases[key].mean, rest) if key in self._phases else 0.0
                self._captured[key] = PhaseTime(taken, 0.0, whole.count)
                rest -= taken
            self._captured[f"batching_{self._what.trainer}"] = PhaseTime(max(rest, 0.0), whole.std, whole.count)
        crowding = 0.0
        if self._host is not None:
            self._steps_during_copies(self._host, alone, item)
            self._host_alone(self._host)
            self._during_host_work(self._host, alone, item)
            self._host.discard(item)
            if self._workers > 1 and self._crowded:
                slower = self._crowded / max(self._phases[HOST_BATCHING].mean, 1e-9) - 1.0
                crowding = slower / (self._workers - 1)  # how much longer each worker takes per additional worker
        workers = 0 if self._host is None else self._workers
        captured, inside = self._captured, self._inside
        return PhaseTimes(self._phases, self._interference, crowding, self._bytes, captured, workers, inside)

    def _next_seeds(self) -> SeedBatch:
        with self._seeds_lock:
            return next(self._seeds)

    def _warm_host(self, host: HostPreparer) -> Any:
        """A batch of each worker and one more, all in memory at once; copies of the latter are timed, and it returns.

        The first batch in a buffer pins it, and concurrent batches seem to take longer, too: epochs on an H200 whose
        division needs more buffers than before take about half a second per GiB more. Afterwards all have one.
        """
        item, *unused = all_at_once([lambda: host.prepare(self._next_seeds())] * (self._workers + 1))
        for each in unused:
            host.discard(each)
        for _ in range(2):  # the example before is kept meanwhile, so that memory for two is there
            self._example = host.transfer(item)
        self._bytes = _bytes_of(item)
        seconds = list[float]()
        for _ in self._counted(self._limit.part()):
            begin = time.perf_counter()
            self._example = host.transfer(item)
            seconds.append(time.perf_counter() - begin)
        # The faster half: of three batches of the host alone one was a stall in half of an H200's profiles.
        faster, all_of_them = sorted(seconds)[: (len(seconds) + 1) // 2], PhaseTime.of(seconds)
        self._phases[TRANSFER] = replace(all_of_them, mean=sum(faster) / len(faster))
        return item

    def _host_alone(self, host: HostPreparer) -> None:
        """Prepare batch after batch in this thread."""
        seconds = list[float]()
        for _ in self._counted(self._limit.part(HOST_ALONE)):
            begin = time.perf_counter()
            item = host.prepare(self._next_seeds())
            seconds.append(time.perf_counter() - begin)
            self._bytes = max(self._bytes, _bytes_of(item))
            host.discard(item)
        # The fastest: other processes hold up a thread of a shared host in most of few batches (131 ms on average, 80
        # later on).
        self._phases[HOST_BATCHING] = replace(PhaseTime.of(seconds), mean=min(seconds))

    def _counted(self, limit: float) -> Iterator[int]:
        """Up to ``steps`` of them, fewer when ``limit`` seconds are over."""
        begin = time.perf_counter()
        for step in range(1, self._steps + 1):
            yield step
            if step >= FEWEST and time.perf_counter() - begin > limit:
                return

    def _repeated(
        self,
        work: Callable[[], Any],
        limit: float,
        enough: Callable[[], bool] = lambda: True,
        firm: bool = False,
    ) -> list[float]:
        """Seconds of calls of ``work`` on the clock of the trainer, the first one not counted.

        If the trainer lags behind the thread that submits its work, it gets a call more in front of each: while other
        threads are busy a submission takes longer than the work, and in a run the trainer has the step before
        meanwhile. Ends after ``steps`` calls and when ``enough()``, or when ``limit`` seconds are over; ``firm``: not
        before ``enough()`` or so many calls.
        """
        seconds, begin = list[float](), time.perf_counter()
        while True:
            if self._clock.lags:
                work()
            first = self._clock.mark()
            work()
            last = self._clock.mark()
            seconds.append(self._clock.seconds(first, last))
            over, all_steps = time.perf_counter() - begin > limit, len(seconds) > self._steps
            if len(seconds) > FEWEST and ((all_steps or over) and (enough() or (over and (all_steps or not firm)))):
                return seconds[1:]

    def _steps_during_copies(self, host: HostPreparer, alone: Mapping[str, Callable[[], Any]], item: Any) -> None:
        """Training and whole captured steps while ``item`` is copied again and again, and copies meanwhile.

        How much of the bus reads leave to copies depends on where they read and by how many multiprocessors: all of it,
        or hardly any.
        """
        training, reading = f"training_{self._what.trainer}", f"transfer_{self._what.trainer}"

        def measured(work: Callable[[], Any], limit: float, firm: bool = False) -> tuple[float, float]:
            """Mean seconds of ``work`` and of the copies meanwhile, 0 if there were none."""
            began = time.perf_counter()
            seconds = self._repeated(work, limit, lambda: len(copies.seconds(began)) >= FEWEST, firm)
            return _mean(seconds), _mean(copies.seconds(began))

        with background([lambda: host.transfer(item)]) as copies:
            copies.wait(lambda: True, 0.0)
            step, copy = measured(alone[training], self._limit.part())
            self._note(training, TRANSFER, step / max(self._phases[training].mean, 1e-9))
            if copy:
                self._note(TRANSFER, training, copy / max(self._phases[TRANSFER].mean, 1e-9))
            if self._what.alone is not None:
                bus = SharedBus(
                    step=sum(time.mean for time in self._captured.values()),
                    reads=self._captured[reading].mean,
                    training=self._captured[training].mean,
                    copy=self._phases[TRANSFER].mean,
                    training_slower=self._interference[training][TRANSFER],
                    copy_slower=self._interference.get(TRANSFER, {}).get(training, 1.0),
                )
                reads, slower = bus.factors(*measured(self._what.alone, self._limit.part(COPYING), firm=True))
                self._inside = {reading: {TRANSFER: reads}, TRANSFER: {reading: slower}}

    def _during_host_work(self, host: HostPreparer, alone: Mapping[str, Callable[[], Any]], item: Any) -> None:
        """All workers of the host at work, by themselves, during each phase of the trainer and during copies.

        In one go: starting the workers, and waiting for their last batches, takes as long as a measurement.
        """

        def work() -> None:
            host.discard(host.prepare(self._next_seeds()))

        with background([work] * self._workers) as calls:
            self._measure_crowding(calls)
            for key, phase in alone.items():
                limit, began = self._limit.part(), time.perf_counter()
                affordable = limit >= ROUNDS * self._crowded  # a batch of every worker that is begun and finished in it
                seconds = self._repeated(phase, limit, lambda: not affordable or self._is_round(calls, began))  # noqa: B023
                self._note(key, HOST_BATCHING, _mean(seconds) / max(self._phases[key].mean, 1e-9))
                self._note_host(key, calls.seconds(began))
            limit = self._limit.part(COPYING)
            if limit < ROUNDS * self._crowded:
                self._note(HOST_BATCHING, TRANSFER, typical(HOST_BATCHING, TRANSFER))
                self._note(TRANSFER, HOST_BATCHING, typical(TRANSFER, HOST_BATCHING))
            else:  # copies read the memory that workers gather from and into
                with background([lambda: host.transfer(item)]) as copies:
                    copies.wait(lambda: True, 0.0)
                    began = time.perf_counter()
                    calls.wait(lambda: self._is_round(calls, began), limit)
                    meanwhile, copied = calls.seconds(began), copies.seconds(began)
                self._note_host(TRANSFER, meanwhile)
                if copied:
                    self._note(TRANSFER, HOST_BATCHING, _mean(copied) / max(self._phases[TRANSFER].mean, 1e-9))
        self._limit.part(LAST_BATCHES)

    def _is_round(self, calls: Calls, began: float) -> bool:
        return calls.failed or len(calls.seconds(began)) >= self._workers

    def _measure_crowding(self, calls: Calls) -> None:
        """What a batch takes while all workers are at work; the first of each is not counted: they begin at once."""
        alone = self._phases[HOST_BATCHING].mean
        limit = max(self._limit.part(CROWDED), LONGEST_ROUNDS * alone)
        if self._workers < 2:
            calls.wait(lambda: True, limit)
            self._crowded = alone
            return
        calls.wait(lambda: calls.threads(after=1) >= self._workers, limit)
        self._crowded = max(median(calls.seconds(after=1) or calls.seconds() or [alone]), alone)

    def _note_host(self, other: str, seconds: list[float]) -> None:
        """Batches that were begun and finished during a phase; fewer than one per worker would be the short ones."""
        enough = len(seconds) >= self._workers
        factor = median(seconds) / max(self._crowded, 1e-9) if enough else typical(HOST_BATCHING, other)
        self._note(HOST_BATCHING, other, factor)

    def _note(self, key: str, other: str, factor: float) -> None:
        """``key`` takes ``factor`` times as long while ``other`` runs; nothing is taken to be faster than alone."""
        self._interference.setdefault(key, {})[other] = max(factor, 1.0)


def _mean(seconds: Sequence[float]) -> float:
    return PhaseTime.of(seconds).mean if seconds else 0.0


def _bytes_of(item: Any) -> int:
    tensors = item.tensors() if hasattr(item, "tensors") else []
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
