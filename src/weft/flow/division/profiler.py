"""Profiler: seconds of every phase of a batch, alone and beside others, in a few seconds.

Each phase runs for some steps (20, or fewer where they take long) with nothing else at work, then what can run at the
same time is run at the same time: all workers of the host beside each phase of the trainer and beside copies, in one
go, and copies beside training. Where the trainer can prepare all batches inside of captured steps, those are measured
as a whole, too.
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
from weft.flow.division.sides import DeviceClock, DeviceSide, HostClock, HostSide
from weft.flow.sampling.seeds import SeedBatch
from weft.flow.stages.streams import arrived

STEPS = 20
LIMIT_SECONDS = 15.0
SEGMENTS = 14  # parts that the limit is divided among
FEWEST = 3  # steps of a segment, however long they take
LEAST_FACTOR = 1.0  # what runs beside something else is not taken to be faster than alone
TRANSFER = "transfer_pcie"


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
    return _Profiler(what, seeds, workers, steps, limit / SEGMENTS).run()


class _Profiler:
    def __init__(
        self, what: Profiled, seeds: Sequence[SeedBatch], workers: int, steps: int, segment_seconds: float
    ) -> None:
        self._what, self._seeds, self._workers = what, cycle(seeds), workers
        self._steps, self._segment = steps, segment_seconds
        self._clock = what.clock or HostClock()
        self._seeds_lock = threading.Lock()
        self._phases: dict[str, PhaseTime] = {}
        self._interference: dict[str, dict[str, float]] = {}
        self._crowding, self._bytes = 0.0, 0
        self._captured: dict[str, PhaseTime] = {}
        self._example: Any = None  # a batch where it is trained

    def run(self) -> PhaseTimes:
        """Everything that there is to measure."""
        if self._what.host is not None:
            self._host_alone()
        alone = self._device_phases()
        for key, work in alone.items():
            self._phases[key] = PhaseTime.of(self._segment_of(work))
        if self._what.alone is not None:
            self._captured = self._parts_of(PhaseTime.of(self._segment_of(self._what.alone)))
        if self._what.host is not None:
            self._beside_host(alone)
            self._beside_transfer(alone)
        if self._what.beside and self._what.device is not None:
            self._beside_preparation(alone)
        about = (self._interference, self._crowding, self._bytes, self._captured)
        return PhaseTimes(self._phases, *about, 0 if self._what.host is None else self._workers)

    # ---- phases alone --------------------------------------------------------------------------------

    def _next_seeds(self) -> SeedBatch:
        with self._seeds_lock:
            return next(self._seeds)

    def _host_alone(self) -> None:
        """Prepare and transfer batch after batch; the first of each compiles and is not counted."""
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
        self._phases |= {HOST_BATCHING: PhaseTime.of(prepared), TRANSFER: PhaseTime.of(moved)}

    @property
    def _host(self) -> HostSide:
        assert self._what.host is not None
        return self._what.host

    def _counted(self) -> Iterator[int]:
        """Steps of a segment: 0 to warm up, then up to ``steps``, fewer when its time is over."""
        begin = time.perf_counter()
        for step in range(self._steps + 1):
            yield step
            if step >= FEWEST and time.perf_counter() - begin > self._segment:
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

    def _wait_for(self, seconds: list[float], count: int) -> None:
        deadline = time.monotonic() + 2 * self._segment
        while len(seconds) < count and time.monotonic() < deadline:
            time.sleep(0.005)

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

    def _segment_of(self, work: Callable[[], Any], enough: Callable[[], bool] = lambda: True) -> list[float]:
        """Seconds of calls of ``work`` on the clock of the trainer, the first one not counted.

        Ends after ``steps`` calls and when ``enough()``, or when the time of a segment is over.
        """
        found, begin = list[float](), time.perf_counter()
        while True:
            first = self._clock.mark()
            work()
            last = self._clock.mark()
            self._clock.wait(last)
            found.append(self._clock.seconds(first, last))
            over = time.perf_counter() - begin > self._segment
            if len(found) > FEWEST and (over or (len(found) > self._steps and enough())):
                return found[1:]

    # ---- phases beside others ------------------------------------------------------------------------

    def _beside_host(self, alone: Mapping[str, Callable[[], Any]]) -> None:
        """All workers of the host at work, by themselves, beside each phase of the trainer and beside copies.

        In one go: starting the workers, and waiting for their last batches, takes as long as a measurement.
        """
        item = self._host.prepare(self._next_seeds())
        with self._busy_host() as seconds:
            self._note_crowding(seconds)
            for key, work in alone.items():
                first = len(seconds)
                found = self._segment_of(work, lambda n=first + self._workers: len(seconds) >= n)
                meanwhile = seconds[first:]
                self._note(key, HOST_BATCHING, _mean(found) / max(self._phases[key].mean, 1e-9))
                self._note_host(key, meanwhile)
            self._copies_meanwhile(item, seconds)
        self._host.discard(item)

    def _note_crowding(self, seconds: list[float]) -> None:
        """How much longer each worker takes per worker more."""
        if self._workers < 2:
            self._wait_for(seconds, 1)
            return
        self._wait_for(seconds, (1 + FEWEST) * self._workers)
        steady = seconds[self._workers :] or seconds  # the first of each worker may allocate its buffers
        ratio = _mean(steady) / max(self._phases[HOST_BATCHING].mean, 1e-9)
        self._crowding = max(ratio - 1.0, 0.0) / (self._workers - 1)

    def _copies_meanwhile(self, item: Any, prepared: list[float]) -> None:
        """While the bus is busy, too: copies read the memory that workers gather from and into."""
        with _background([lambda: self._host.transfer(item)]) as moved:
            self._wait_for(moved, 1)
            first, before = len(prepared), len(moved)
            self._wait_for(prepared, first + FEWEST * self._workers)
            meanwhile, copies = prepared[first:], moved[before:]
        self._note_host(TRANSFER, meanwhile)
        if copies:
            self._note(TRANSFER, HOST_BATCHING, _mean(copies) / max(self._phases[TRANSFER].mean, 1e-9))

    def _note_host(self, beside: str, seconds: list[float]) -> None:
        """Batches of all workers that were finished beside a phase."""
        if seconds:
            crowded = self._phases[HOST_BATCHING].mean * (1.0 + self._crowding * (self._workers - 1))
            self._note(HOST_BATCHING, beside, _mean(seconds) / max(crowded, 1e-9))

    def _beside_transfer(self, alone: Mapping[str, Callable[[], Any]]) -> None:
        """Training while the bus is busy, reads of a device that prepares beside training, and copies meanwhile.

        How much of the bus such reads leave to copies depends on where they read: all of it, or hardly any.
        """
        trainer, host = self._what.trainer, self._host
        keys = [f"training_{trainer}"] + ([f"transfer_{trainer}"] if self._what.beside else [])
        item = host.prepare(self._next_seeds())
        with _background([lambda: host.transfer(item)]) as seconds:
            self._wait_for(seconds, 1)
            for key in (one for one in keys if one in alone):
                first = len(seconds)
                found = self._segment_of(alone[key], lambda n=first: len(seconds) > n)
                meanwhile = seconds[first:]
                self._note(key, TRANSFER, _mean(found) / max(self._phases[key].mean, 1e-9))
                if meanwhile:
                    self._note(TRANSFER, key, _mean(meanwhile) / max(self._phases[TRANSFER].mean, 1e-9))
        host.discard(item)

    def _beside_preparation(self, alone: Mapping[str, Callable[[], Any]]) -> None:
        """Training while the device samples, and while it reads features, and both meanwhile."""
        training = f"training_{self._what.trainer}"
        for key in (f"batching_{self._what.trainer}", f"transfer_{self._what.trainer}"):
            with _background([alone[key]]) as seconds:
                self._wait_for(seconds, 1)
                first = len(seconds)
                found = self._segment_of(alone[training], lambda s=seconds, n=first: len(s) > n)
                meanwhile = seconds[first:]
            self._note(training, key, _mean(found) / max(self._phases[training].mean, 1e-9))
            if meanwhile:
                self._note(key, training, _mean(meanwhile) / max(self._phases[key].mean, 1e-9))

    def _note(self, key: str, beside: str, factor: float) -> None:
        self._interference.setdefault(key, {})[beside] = max(factor, LEAST_FACTOR)

    @contextmanager
    def _busy_host(self) -> Iterator[list[float]]:
        """All workers prepare batches for nobody; yields the seconds of each."""

        def work() -> None:
            self._host.discard(self._host.prepare(self._next_seeds()))

        with _background([work] * self._workers) as seconds:
            yield seconds


@contextmanager
def _background(works: Sequence[Callable[[], Any]]) -> Iterator[list[float]]:
    """Every work again and again in a thread of its own; yields the seconds of finished calls. Errors come out."""
    seconds, errors, over = list[float](), list[BaseException](), threading.Event()

    def run(work: Callable[[], Any]) -> None:
        try:
            while not over.is_set():
                begin = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - begin)
        except BaseException as error:
            errors.append(error)

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
