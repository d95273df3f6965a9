"""Profiler: seconds of every phase of a batch, alone and beside others, in a few seconds.

Each phase runs for some steps (20, or fewer where they take long) with nothing else at work, then what can run at the
same time is run at the same time: all workers of the host beside each phase of the trainer and beside copies, in one
go, and copies beside training. Where the trainer can prepare batches inside of captured steps, those are measured as a
whole, alone and beside copies, too. All of it ends at a limit, which the parts share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from weft.core.division import PhaseTime, PhaseTimes
from weft.core.division.phase_times import HOST_BATCHING
from weft.core.division.shared_bus import SharedBus
from weft.flow.division.sides import DeviceClock, DeviceSide, HostClock, HostSide
from weft.flow.division.time_limit import TimeLimit
from weft.flow.sampling.seeds import SeedBatch
from weft.flow.stages.streams import arrived

STEPS = 20
LIMIT_SECONDS = 15.0
FEWEST = 3  # steps of a part, however long they take
# Of the limit: batches of the host alone and of all its workers take long, the trainer's phases alone hardly vary, and
# the end of the workers' last batches is waited for. Beside copies it is whole steps that matter most.
HOST_ALONE, CROWDED, LAST_BATCHES, WHOLE, COPYING = 4.0, 3.0, 1.5, 1.5, 2.0
FEW_STALLS = 1.3  # times the median of few batches of the host from which on one is a stall: a buffer may be pinned
LEAST_FACTOR = 1.0  # what runs beside something else is not taken to be faster than alone
TRANSFER = "transfer_pcie"
OWN = ("batching", "transfer")  # phases of a trainer that prepares batches


@dataclass(frozen=True)
class Profiled:
    """What to measure: both sides (None: not there), a training step on an item, and the hardware's name and clock.

    ``beside``: the device prepares while it trains. ``alone``: a whole step as the trainer does it where it prepares
    all batches: sampling, reading and training in one; None if that is no different.
    """

    host: HostSide | None
    device: DeviceSide | None
    train: Callable[[Any], Any]
    trainer: str = "gpu"
    clock: DeviceClock | None = None
    beside: bool = False
    alone: Callable[[], Any] | None = None


def profile(
    what: Profiled, seeds: Sequence[SeedBatch], workers: int = 1, steps: int = STEPS, limit: float = LIMIT_SECONDS
) -> PhaseTimes:
    """Mean and variance of every phase over up to ``steps`` batches of ``seeds``, and how phases slow each other down.

    Takes at most about ``limit`` seconds, or a few steps of each phase where those take longer. ``train`` changes
    whatever it changes: the caller restores it.
    """
    return _Profiler(what, seeds, workers, steps, limit).run()


class _Profiler:
    def __init__(self, what: Profiled, seeds: Sequence[SeedBatch], workers: int, steps: int, limit: float) -> None:
        self._what, self._seeds, self._workers = what, cycle(seeds), workers
        self._steps, self._limit = steps, TimeLimit(limit, _weight(what))
        self._clock = what.clock or HostClock()
        self._seeds_lock = threading.Lock()
        self._phases: dict[str, PhaseTime] = {}
        self._interference: dict[str, dict[str, float]] = {}
        self._crowding, self._bytes = 0.0, 0
        self._captured: dict[str, PhaseTime] = {}
        self._inside: dict[str, dict[str, float]] = {}
        self._example: Any = None  # a batch where it is trained

    def run(self) -> PhaseTimes:
        """Everything that there is to measure."""
        if self._what.host is not None:
            self._host_alone()
        alone = self._device_phases()
        for key, work in alone.items():
            self._phases[key] = PhaseTime.of(self._part_of(work))
        if self._what.alone is not None:
            self._captured = self._parts_of(PhaseTime.of(self._part_of(self._what.alone, weight=WHOLE)))
        if self._what.host is not None:
            item = self._host.prepare(self._next_seeds())
            self._beside_host(alone, item)
            self._beside_transfer(alone, item)
            self._host.discard(item)
        if self._what.beside and self._what.device is not None:
            self._beside_preparation(alone)
        about = (self._interference, self._crowding, self._bytes, self._captured)
        return PhaseTimes(self._phases, *about, 0 if self._what.host is None else self._workers, self._inside)

    # ---- phases alone --------------------------------------------------------------------------------

    def _next_seeds(self) -> SeedBatch:
        with self._seeds_lock:
            return next(self._seeds)

    def _host_alone(self) -> None:
        """Prepare and transfer batch after batch; the first of each compiles and is not counted, nor is a stall."""
        host = self._host
        prepared, moved = [], []
        for step in self._counted():
            begin = time.perf_counter()
            item = host.prepare(self._next_seeds())
            middle = time.perf_counter()
            self._example = host.transfer(item)
            end = time.perf_counter()
            self._bytes = max(self._bytes, _bytes_of(item))
            host.discard(item)
            if step:
                prepared.append(middle - begin)
                moved.append(end - middle)
        found = {HOST_BATCHING: prepared, TRANSFER: moved}
        self._phases |= {key: PhaseTime.of(seconds, FEW_STALLS) for key, seconds in found.items()}

    @property
    def _host(self) -> HostSide:
        assert self._what.host is not None
        return self._what.host

    def _counted(self) -> Iterator[int]:
        """Steps of the host alone: 0 to warm up, then up to ``steps``, fewer when their time is over."""
        begin, seconds = time.perf_counter(), self._limit.part(HOST_ALONE)
        for step in range(self._steps + 1):
            yield step
            if step >= FEWEST and time.perf_counter() - begin > seconds:
                return

    def _parts_of(self, whole: PhaseTime) -> dict[str, PhaseTime]:
        """The phases of a step that has all of them: training as alone, then reading, and sampling is the rest."""
        left, found = whole.mean, dict[str, PhaseTime]()
        for phase in ("training", "transfer"):
            key = f"{phase}_{self._what.trainer}"
            taken = min(self._phases[key].mean, left) if key in self._phases else 0.0
            found[key] = PhaseTime(taken, 0.0, whole.count)
            left -= taken
        return found | {f"batching_{self._what.trainer}": PhaseTime(max(left, 0.0), whole.std, whole.count)}

    @staticmethod
    def _wait_for(seconds: _Calls, count: int, limit: float) -> None:
        """Until so many are there, or ``limit`` seconds are over; the first one is waited for in any case."""
        deadline = time.monotonic() + limit
        while not seconds.failed and (not seconds or (len(seconds) < count and time.monotonic() < deadline)):
            time.sleep(0.002)

    def _device_phases(self) -> dict[str, Callable[[], Any]]:
        """The phases of the trainer by name, each as a call."""
        device, trainer, found = self._what.device, self._what.trainer, {}
        if device is not None:
            sampled = device.batch(self._next_seeds())
            self._example = device.read(sampled)
            found[f"batching_{trainer}"] = lambda: device.batch(self._next_seeds())
            found[f"transfer_{trainer}"] = lambda: device.read(sampled)
        example = arrived(self._example)
        found[f"training_{trainer}"] = lambda: self._what.train(example)
        return found

    def _part_of(
        self, work: Callable[[], Any], enough: Callable[[], bool] = lambda: True, weight: float = 1.0
    ) -> list[float]:
        """Seconds of calls of ``work`` on the clock of the trainer, the first one not counted.

        Ends after ``steps`` calls and when ``enough()``, or when its part of the limit is over.
        """
        found, begin, limit = list[float](), time.perf_counter(), self._limit.part(weight)
        while True:
            first = self._clock.mark()
            work()
            last = self._clock.mark()
            self._clock.wait(last)
            found.append(self._clock.seconds(first, last))
            over = time.perf_counter() - begin > limit
            if len(found) > FEWEST and (over or (len(found) > self._steps and enough())):
                return found[1:]

    # ---- phases beside others ------------------------------------------------------------------------

    def _beside_host(self, alone: Mapping[str, Callable[[], Any]], item: Any) -> None:
        """All workers of the host at work, by themselves, beside each phase of the trainer and beside copies.

        In one go: starting the workers, and waiting for their last batches, takes as long as a measurement.
        """
        with self._busy_host() as seconds:
            self._note_crowding(seconds)
            for key, work in alone.items():
                first = len(seconds)
                found = self._part_of(work, lambda n=first + self._workers: len(seconds) >= n)
                meanwhile = seconds[first:]
                self._note(key, HOST_BATCHING, _mean(found) / max(self._phases[key].mean, 1e-9))
                self._note_host(key, meanwhile)
            self._copies_meanwhile(item, seconds)
        self._limit.part(LAST_BATCHES)

    def _note_crowding(self, seconds: _Calls) -> None:
        """How much longer each worker takes per worker more."""
        limit = max(self._limit.part(CROWDED), 3.0 * self._phases[HOST_BATCHING].mean)  # two batches of each
        if self._workers < 2:
            self._wait_for(seconds, 1, limit)
            return
        self._wait_for(seconds, 2 * self._workers, limit)
        steady = seconds[self._workers :] or seconds  # the first of each worker may allocate its buffers
        ratio = _mean(steady) / max(self._phases[HOST_BATCHING].mean, 1e-9)
        self._crowding = max(ratio - 1.0, 0.0) / (self._workers - 1)

    def _copies_meanwhile(self, item: Any, prepared: _Calls) -> None:
        """While the bus is busy, too: copies read the memory that workers gather from and into."""
        limit = max(self._limit.part(COPYING), 1.5 * self._phases[HOST_BATCHING].mean)  # a batch of each
        with self._copying(item) as moved:
            first, before = len(prepared), len(moved)
            self._wait_for(prepared, first + 2 * self._workers, limit)
            meanwhile, copies = prepared[first:], moved[before:]
        self._note_host(TRANSFER, meanwhile)
        if copies:
            self._note(TRANSFER, HOST_BATCHING, _mean(copies) / max(self._phases[TRANSFER].mean, 1e-9))

    def _note_host(self, beside: str, seconds: list[float]) -> None:
        """Batches that were finished beside a phase; fewer than one of each worker were begun before it, mostly."""
        if len(seconds) >= self._workers:
            crowded = self._phases[HOST_BATCHING].mean * (1.0 + self._crowding * (self._workers - 1))
            self._note(HOST_BATCHING, beside, _mean(seconds) / max(crowded, 1e-9))

    def _beside_transfer(self, alone: Mapping[str, Callable[[], Any]], item: Any) -> None:
        """The trainer's phases while ``item`` is copied again and again, and copies meanwhile.

        How much of the bus reads leave to copies depends on where they read and by how many multiprocessors: all of it,
        or hardly any. A device that samples beside training copies seeds, which wait for the copies before them.
        """
        trainer = self._what.trainer
        keys = [f"training_{trainer}"] + ([f"{one}_{trainer}" for one in OWN] if self._what.beside else [])
        with self._copying(item) as seconds:
            for key in (one for one in keys if one in alone):
                found, copied = self._while_copying(alone[key], seconds)
                self._note(key, TRANSFER, found / max(self._phases[key].mean, 1e-9))
                if copied:
                    self._note(TRANSFER, key, copied / max(self._phases[TRANSFER].mean, 1e-9))
            if self._what.alone is not None:
                self._inside = self._shared_bus(*self._while_copying(self._what.alone, seconds, COPYING))

    def _while_copying(self, work: Callable[[], Any], copies: list[float], weight: float = 1.0) -> tuple[float, float]:
        """Mean seconds of ``work`` and of the copies meanwhile, 0 if there were none."""
        first = len(copies)
        found = self._part_of(work, lambda: len(copies) > first + FEWEST, weight)
        return _mean(found), _mean(copies[first + 1 :])  # the first one had begun before

    def _shared_bus(self, step: float, copy: float) -> dict[str, dict[str, float]]:
        """How reads inside of steps and copies slow each other down."""
        trainer, found, beside = self._what.trainer, self._captured, self._interference
        reading, training = f"transfer_{trainer}", f"training_{trainer}"
        seconds = (sum(one.mean for one in found.values()), found[reading].mean, found[training].mean)
        slower = beside.get(training, {}).get(TRANSFER, 1.0), beside.get(TRANSFER, {}).get(training, 1.0)
        reads, copies = SharedBus(*seconds, self._phases[TRANSFER].mean, *slower).factors(step, copy)
        return {reading: {TRANSFER: reads}, TRANSFER: {reading: copies}}

    def _beside_preparation(self, alone: Mapping[str, Callable[[], Any]]) -> None:
        """Training while the device samples, and while it reads features, and both meanwhile."""
        training = f"training_{self._what.trainer}"
        for key in (f"batching_{self._what.trainer}", f"transfer_{self._what.trainer}"):
            with _background([alone[key]]) as seconds:
                self._wait_for(seconds, 1, 0.0)
                first = len(seconds)
                found = self._part_of(alone[training], lambda s=seconds, n=first: len(s) > n)
                meanwhile = seconds[first:]
            self._note(training, key, _mean(found) / max(self._phases[training].mean, 1e-9))
            if meanwhile:
                self._note(key, training, _mean(meanwhile) / max(self._phases[key].mean, 1e-9))

    def _note(self, key: str, beside: str, factor: float) -> None:
        self._interference.setdefault(key, {})[beside] = max(factor, LEAST_FACTOR)

    @contextmanager
    def _busy_host(self) -> Iterator[_Calls]:
        """All workers prepare batches for nobody; yields the seconds of each."""

        def work() -> None:
            self._host.discard(self._host.prepare(self._next_seeds()))

        with _background([work] * self._workers) as seconds:
            yield seconds

    @contextmanager
    def _copying(self, item: Any) -> Iterator[_Calls]:
        """``item`` is copied again and again; yields the seconds of each copy, of which there is one already."""
        with _background([lambda: self._host.transfer(item)]) as seconds:
            self._wait_for(seconds, 1, 0.0)
            yield seconds


def _weight(what: Profiled) -> float:
    """Of all parts of a profile."""
    phases = 1.0 + (2.0 if what.device is not None else 0.0)
    whole = 0.0 if what.alone is None else WHOLE
    if what.host is not None:
        copied = phases if what.beside else 1.0
        whole += HOST_ALONE + CROWDED + phases + COPYING + LAST_BATCHES + copied
        whole += 0.0 if what.alone is None else COPYING
    return phases + whole + (2.0 if what.beside and what.device is not None else 0.0)


class _Calls(list[float]):
    """Seconds of finished calls; ``failed``: there may be no more of them."""

    failed = False


@contextmanager
def _background(works: Sequence[Callable[[], Any]]) -> Iterator[_Calls]:
    """Every work again and again in a thread of its own; yields the seconds of finished calls. Errors come out."""
    seconds, errors, over = _Calls(), list[BaseException](), threading.Event()

    def run(work: Callable[[], Any]) -> None:
        try:
            while not over.is_set():
                begin = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - begin)
        except BaseException as error:
            errors.append(error)
            seconds.failed = True

    threads = [threading.Thread(target=run, args=(work,), name="weft-profile", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield seconds
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _mean(seconds: Sequence[float]) -> float:
    return PhaseTime.of(seconds).mean if seconds else 0.0


def _bytes_of(item: Any) -> int:
    tensors = item.tensors() if hasattr(item, "tensors") else []
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
