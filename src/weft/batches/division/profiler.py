"""Profiler: seconds of every phase of a batch, alone and beside others, in a few seconds.

First every worker of the host prepares a batch that is not counted, all at the same time: it pins the buffer, touches
the tables of the sampler and compiles. Then each phase runs for some steps (20, or fewer where they take long) with
nothing else at work, and what can run at the same time is run at the same time: captured steps that prepare their batch
beside copies, all workers of the host, and these beside phases of the trainer and copies. All of it ends at a limit,
which the parts share. Pairs of phases that there is no time for are taken to slow each other down as is typical.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

from weft.batches.division.measuring import Calls, TimeLimit, all_at_once, background
from weft.batches.division.preparers import DeviceClock, DeviceSide, HostClock, HostSide
from weft.batches.pipeline import arrived
from weft.batches.sampler import SeedBatch
from weft.core.division import HOST_BATCHING, PhaseTime, PhaseTimes, SharedBus, typical

STEPS = 20
LIMIT_SECONDS = 15.0
FEWEST = 3  # steps of a part, however long they take
# Of the limit: batches of the host alone and of all its workers take long, the trainer's phases alone hardly vary, and
# the end of the workers' last batches is waited for. Beside copies it is whole steps that matter most.
HOST_ALONE, CROWDED, LAST_BATCHES, WHOLE, COPYING = 4.0, 3.0, 1.5, 1.5, 2.0
LONGEST_ROUNDS = 8.0  # times the seconds of one worker alone that two batches of each of all workers may take
ROUNDS = 2.2  # times the seconds of a batch until every worker has begun one and finished it
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
        self._crowded = 0.0  # seconds of a batch of the host while all workers are at work
        self._bytes = 0
        self._captured: dict[str, PhaseTime] = {}
        self._inside: dict[str, dict[str, float]] = {}
        self._example: Any = None  # a batch where it is trained

    def run(self) -> PhaseTimes:
        """Everything that there is to measure, what no division can be chosen without first."""
        item = None if self._what.host is None else self._warm_host()
        if item is not None:
            self._copies_alone(item)
        alone = self._device_phases()
        for key, work in alone.items():
            self._phases[key] = PhaseTime.of(self._part_of(work))
        if self._what.alone is not None:
            self._captured = self._parts_of(PhaseTime.of(self._part_of(self._what.alone, weight=WHOLE)))
        if item is not None:
            self._steps_beside_copies(alone, item)
            self._host_alone()
            self._beside_host(alone, item)
            self._own_beside_copies(alone, item)
            self._host.discard(item)
        if self._what.beside and self._what.device is not None:
            self._beside_preparation(alone)
        about = (self._interference, self._crowding, self._bytes, self._captured)
        return PhaseTimes(self._phases, *about, 0 if self._what.host is None else self._workers, self._inside)

    # ---- phases alone --------------------------------------------------------------------------------

    def _next_seeds(self) -> SeedBatch:
        with self._seeds_lock:
            return next(self._seeds)

    def _warm_host(self) -> Any:
        """A batch of each worker and one of this thread, all in memory at once; returns the latter.

        The first batch in a buffer pins it, and batches beside that seem to take longer, too: epochs on an H200 whose
        division needs more buffers than before take about half a second per GiB more. Afterwards all have one.
        """
        prepare = lambda: self._host.prepare(self._next_seeds())  # noqa: E731
        item, others = all_at_once(prepare, [prepare] * self._workers)
        for one in others:
            self._host.discard(one)
        for _ in range(2):  # the example before is kept meanwhile, so that memory for two is there
            self._example = self._host.transfer(item)
        return item

    def _copies_alone(self, item: Any) -> None:
        """Copy ``item`` again and again."""
        self._bytes = _bytes_of(item)
        found = list[float]()
        for _ in self._counted(self._limit.part()):
            begin = time.perf_counter()
            self._example = self._host.transfer(item)
            found.append(time.perf_counter() - begin)
        self._phases[TRANSFER] = _usual(found)

    def _host_alone(self) -> None:
        """Prepare batch after batch in this thread."""
        found = list[float]()
        for _ in self._counted(self._limit.part(HOST_ALONE)):
            begin = time.perf_counter()
            item = self._host.prepare(self._next_seeds())
            found.append(time.perf_counter() - begin)
            self._bytes = max(self._bytes, _bytes_of(item))
            self._host.discard(item)
        self._phases[HOST_BATCHING] = _fastest(found)

    @property
    def _host(self) -> HostSide:
        assert self._what.host is not None
        return self._what.host

    def _counted(self, limit: float) -> Iterator[int]:
        """Up to ``steps`` of them, fewer when ``limit`` seconds are over."""
        begin = time.perf_counter()
        for step in range(1, self._steps + 1):
            yield step
            if step >= FEWEST and time.perf_counter() - begin > limit:
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
    def _wait_for(calls: Calls, enough: Callable[[], bool], limit: float) -> None:
        """Until ``enough()``, or ``limit`` seconds are over; the first call is waited for in any case."""
        deadline = time.monotonic() + limit
        while not calls.failed and (not calls or (not enough() and time.monotonic() < deadline)):
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

    def _part_of(self, work: Callable[[], Any], weight: float = 1.0) -> list[float]:
        return self._repeated(work, self._limit.part(weight))

    def _repeated(
        self,
        work: Callable[[], Any],
        limit: float,
        enough: Callable[[], bool] = lambda: True,
        firm: bool = False,
    ) -> list[float]:
        """Seconds of calls of ``work`` on the clock of the trainer, the first one not counted.

        Where the trainer lags behind the thread that submits its work, it is given a call more in front of each: beside
        busy threads a submission takes longer than the work, and in a run the trainer has the step before meanwhile.
        Ends after ``steps`` calls and when ``enough()``, or when ``limit`` seconds are over; ``firm``: not before
        ``enough()`` or so many calls.
        """
        found, begin = list[float](), time.perf_counter()
        while True:
            if self._clock.lags:
                work()
            first = self._clock.mark()
            work()
            last = self._clock.mark()
            self._clock.wait(last)
            found.append(self._clock.seconds(first, last))
            over, all_steps = time.perf_counter() - begin > limit, len(found) > self._steps
            if len(found) > FEWEST and ((all_steps or over) and (enough() or (over and (all_steps or not firm)))):
                return found[1:]

    # ---- phases beside copies ------------------------------------------------------------------------

    def _steps_beside_copies(self, alone: Mapping[str, Callable[[], Any]], item: Any) -> None:
        """Training and whole captured steps while ``item`` is copied again and again, and copies meanwhile.

        How much of the bus reads leave to copies depends on where they read and by how many multiprocessors: all of it,
        or hardly any.
        """
        training = f"training_{self._what.trainer}"
        with self._copying(item) as copies:
            self._note_copying(training, *self._while_copying(alone[training], copies, self._limit.part()))
            if self._what.alone is not None:
                seconds = self._limit.part(COPYING)
                self._inside = self._shared_bus(*self._while_copying(self._what.alone, copies, seconds, firm=True))

    def _own_beside_copies(self, alone: Mapping[str, Callable[[], Any]], item: Any) -> None:
        """Phases of a device that prepares beside training, while ``item`` is copied, and copies meanwhile.

        Sampling copies seeds, which wait for the copies before them.
        """
        keys = [f"{one}_{self._what.trainer}" for one in OWN] if self._what.beside else []
        for key in (one for one in keys if one in alone):
            seconds = self._limit.part()
            if not seconds:
                self._note_typical(key, TRANSFER)
                continue
            with self._copying(item) as copies:
                self._note_copying(key, *self._while_copying(alone[key], copies, seconds))

    def _while_copying(
        self, work: Callable[[], Any], copies: Calls, limit: float, firm: bool = False
    ) -> tuple[float, float]:
        """Mean seconds of ``work`` and of the copies meanwhile, 0 if there were none."""
        began = time.perf_counter()
        found = self._repeated(work, limit, lambda: len(copies.seconds(began)) >= FEWEST, firm)
        return _mean(found), _mean(copies.seconds(began))

    def _note_copying(self, key: str, found: float, copied: float) -> None:
        self._note(key, TRANSFER, found / max(self._phases[key].mean, 1e-9))
        if copied:
            self._note(TRANSFER, key, copied / max(self._phases[TRANSFER].mean, 1e-9))

    def _shared_bus(self, step: float, copy: float) -> dict[str, dict[str, float]]:
        """How reads inside of steps and copies slow each other down."""
        trainer, found, beside = self._what.trainer, self._captured, self._interference
        reading, training = f"transfer_{trainer}", f"training_{trainer}"
        seconds = (sum(one.mean for one in found.values()), found[reading].mean, found[training].mean)
        slower = beside.get(training, {}).get(TRANSFER, 1.0), beside.get(TRANSFER, {}).get(training, 1.0)
        reads, copies = SharedBus(*seconds, self._phases[TRANSFER].mean, *slower).factors(step, copy)
        return {reading: {TRANSFER: reads}, TRANSFER: {reading: copies}}

    # ---- phases beside all workers -------------------------------------------------------------------

    def _beside_host(self, alone: Mapping[str, Callable[[], Any]], item: Any) -> None:
        """All workers of the host at work, by themselves, beside each phase of the trainer and beside copies.

        In one go: starting the workers, and waiting for their last batches, takes as long as a measurement.
        """
        with self._busy_host() as calls:
            self._note_crowding(calls)
            for key, work in alone.items():
                seconds, began = self._limit.part(), time.perf_counter()
                enough = partial(self._round, calls, began) if self._affords_round(seconds) else _always
                found = self._repeated(work, seconds, enough)
                self._note(key, HOST_BATCHING, _mean(found) / max(self._phases[key].mean, 1e-9))
                self._note_host(key, calls.seconds(began))
            self._copies_meanwhile(item, calls)
        self._limit.part(LAST_BATCHES)

    def _note_crowding(self, calls: Calls) -> None:
        """What a batch takes while all workers are at work; the first of each is not counted: they begin at once."""
        alone = self._phases[HOST_BATCHING].mean
        limit = max(self._limit.part(CROWDED), LONGEST_ROUNDS * alone)
        if self._workers < 2:
            self._wait_for(calls, lambda: True, limit)
            self._crowded = alone
            return
        self._wait_for(calls, lambda: calls.threads(after=1) >= self._workers, limit)
        self._crowded = max(median(calls.seconds(after=1) or calls.seconds() or [alone]), alone)

    @property
    def _crowding(self) -> float:
        """How much longer each worker takes per worker more."""
        if self._workers < 2 or not self._crowded:
            return 0.0
        return (self._crowded / max(self._phases[HOST_BATCHING].mean, 1e-9) - 1.0) / (self._workers - 1)

    def _affords_round(self, seconds: float) -> bool:
        """Whether ``seconds`` are enough for a batch of every worker that is begun and finished in them."""
        return seconds >= ROUNDS * self._crowded

    def _round(self, calls: Calls, began: float) -> bool:
        return calls.failed or len(calls.seconds(began)) >= self._workers

    def _copies_meanwhile(self, item: Any, calls: Calls) -> None:
        """While the bus is busy, too: copies read the memory that workers gather from and into."""
        seconds = self._limit.part(COPYING)
        if not self._affords_round(seconds):
            self._note_typical(HOST_BATCHING, TRANSFER)
            return
        with self._copying(item) as copies:
            began = time.perf_counter()
            self._wait_for(calls, partial(self._round, calls, began), seconds)
            meanwhile, copied = calls.seconds(began), copies.seconds(began)
        self._note_host(TRANSFER, meanwhile)
        if copied:
            self._note(TRANSFER, HOST_BATCHING, _mean(copied) / max(self._phases[TRANSFER].mean, 1e-9))

    def _note_host(self, beside: str, seconds: list[float]) -> None:
        """Batches that were begun and finished beside a phase: of fewer than one per worker the short ones."""
        enough = len(seconds) >= self._workers
        factor = median(seconds) / max(self._crowded, 1e-9) if enough else typical(HOST_BATCHING, beside)
        self._note(HOST_BATCHING, beside, factor)

    # ---- phases beside training ----------------------------------------------------------------------

    def _beside_preparation(self, alone: Mapping[str, Callable[[], Any]]) -> None:
        """Training while the device samples, and while it reads features, and both meanwhile."""
        training = f"training_{self._what.trainer}"
        for key in (f"batching_{self._what.trainer}", f"transfer_{self._what.trainer}"):
            seconds = self._limit.part()
            if not seconds:
                self._note_typical(training, key)
                continue
            with background([alone[key]]) as calls:
                self._wait_for(calls, lambda: True, 0.0)
                began = time.perf_counter()
                found = self._repeated(alone[training], seconds, lambda c=calls, b=began: bool(c.seconds(b)))
                meanwhile = calls.seconds(began)
            self._note(training, key, _mean(found) / max(self._phases[training].mean, 1e-9))
            if meanwhile:
                self._note(key, training, _mean(meanwhile) / max(self._phases[key].mean, 1e-9))

    def _note(self, key: str, beside: str, factor: float) -> None:
        self._interference.setdefault(key, {})[beside] = max(factor, LEAST_FACTOR)

    def _note_typical(self, key: str, other: str) -> None:
        """Two phases that there was no time to run beside each other."""
        self._note(key, other, typical(key, other))
        self._note(other, key, typical(other, key))

    @contextmanager
    def _busy_host(self) -> Iterator[Calls]:
        """All workers prepare batches that are not trained on; yields the calls."""

        def work() -> None:
            self._host.discard(self._host.prepare(self._next_seeds()))

        with background([work] * self._workers) as calls:
            yield calls

    @contextmanager
    def _copying(self, item: Any) -> Iterator[Calls]:
        """``item`` is copied again and again; yields the copies, of which there is one already."""
        with background([lambda: self._host.transfer(item)]) as calls:
            self._wait_for(calls, lambda: True, 0.0)
            yield calls


def _weight(what: Profiled) -> float:
    """Of all parts of a profile."""
    phases = 1.0 + (2.0 if what.device is not None else 0.0)
    whole = 0.0 if what.alone is None else WHOLE
    if what.host is not None:
        copied = phases if what.beside else 1.0
        whole += 1.0 + HOST_ALONE + CROWDED + phases + COPYING + LAST_BATCHES + copied
        whole += 0.0 if what.alone is None else COPYING
    return phases + whole + (2.0 if what.beside and what.device is not None else 0.0)


def _always() -> bool:
    return True


def _usual(seconds: Sequence[float]) -> PhaseTime:
    """The mean of the faster half: of three batches of the host alone one was a stall in half of an H200's profiles."""
    found = PhaseTime.of(seconds)
    lower = sorted(seconds)[: (len(seconds) + 1) // 2]
    return PhaseTime(sum(lower) / len(lower), found.std, found.count)


def _fastest(seconds: Sequence[float]) -> PhaseTime:
    """The fastest: others hold up a thread of a shared host in most of few batches (131 ms on average, 80 later on)."""
    found = PhaseTime.of(seconds)
    return PhaseTime(min(seconds), found.std, found.count)


def _mean(seconds: Sequence[float]) -> float:
    return PhaseTime.of(seconds).mean if seconds else 0.0


def _bytes_of(item: Any) -> int:
    tensors = item.tensors() if hasattr(item, "tensors") else []
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
