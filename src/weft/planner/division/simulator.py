"""Simulate an epoch under a division, event by event in continuous time, on host, bus, device and two buffers.

Every activity occupies resources exclusively (the host has as many as workers). While activities run at once they slow
each other down by the measured interference; an event is the end of one. If the trainer prepares all batches, it does
so in captured steps, whose phases have times of their own. Copies and the device's reads share the bus if it was
measured how they slow each other down. Results are per batch, so that epochs of different lengths compare. The epoch of
an elastic division is one that follows another: the host has begun some of its batches while that one ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from weft.core.division import BUS, HOST, Division, DualBuffer, Operator, PhaseTimes, Registry
from weft.core.errors import SpecError

READS = "pcie reads"  # of the bus, by the trainer itself, concurrent with copies
MOST_SIMULATED = 240  # batches; a longer epoch repeats its middle
BEFORE = 64  # batches of the epoch before, at most: its end is what matters


@dataclass(frozen=True)
class Load:
    """Seconds per batch on one resource: of a batch that the host prepares, and of one that the device prepares.

    With a share s of the batches prepared by the device a resource is busy for ``host + s * (device - host)`` seconds
    per batch, and the busiest resource bounds the throughput of every schedule. Minimising that bound over s is
    MorphGL's Equation 6: for a ratio of 1 : x, with x = s / (1 - s), its terms are the loads of PCIe, GPU and CPU.
    """

    host: float
    device: float

    def at(self, share: float) -> float:
        """With that share of the batches prepared by the device."""
        return self.host + share * (self.device - self.host)


def device_operators(registry: Registry, trainer: str, times: PhaseTimes) -> tuple[Operator, ...]:
    """The operators of ``trainer`` that prepare batches, none if it cannot.

    They hold the bus, unless it was measured how copies and the trainer's reads slow each other down: random reads of
    much memory take longer than the bus needs for them, and then both run at the same time.
    """
    host, device = registry.host_route(), registry.device_route(trainer)
    if not host or not device:
        return device
    copying, reading = host[-1].key, device[-1].key
    pairs = ((copying, reading), (reading, copying))
    if not all(other in times.interference.get(key, {}) for key, other in pairs):
        return device
    return tuple(
        replace(operator, occupies=tuple(READS if name == BUS else name for name in operator.occupies))
        for operator in device
    )


def loads(times: PhaseTimes, registry: Registry, trainer: str, workers: int, elastic: bool = False) -> dict[str, Load]:
    """The load of every resource, the host's divided by its workers; ``elastic``: with phases inside captured steps."""
    times = times.in_step() if elastic else times
    sides = (registry.host_route(), device_operators(registry, trainer, times))
    seconds: dict[str, list[float]] = {}
    for side, operators in enumerate(sides):
        for operator in (*operators, registry.training(trainer)):
            for resource in operator.occupies:
                taken = times.of(operator.key, workers).mean / (workers if resource == HOST else 1)
                seconds.setdefault(resource, [0.0, 0.0])[side] += taken
    return {resource: Load(*both) for resource, both in seconds.items()}


def bound(by_resource: Mapping[str, Load], share: float) -> float:
    """Seconds per batch that no schedule with that share goes below."""
    return max(load.at(share) for load in by_resource.values())


@dataclass(frozen=True)
class Activity:
    """One phase of one batch: which resources it held from when to when."""

    key: str
    batch: int
    resources: tuple[str, ...]
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A simulated epoch of ``batches`` batches: seconds, busy seconds by resource, and which side waited.

    ``activities``: all of a short epoch, the beginning of a long one; those that began while the epoch before ended
    begin before 0.
    """

    division: Division
    batches: int
    seconds: float
    busy: dict[str, float]
    activities: tuple[Activity, ...]
    device_waited: float = 0.0
    host_waited: float = 0.0

    @property
    def seconds_per_batch(self) -> float:
        """Seconds of the epoch divided by its batches."""
        return self.seconds / max(self.batches, 1)

    @property
    def host_is_late(self) -> bool:
        """Whether the device waited for the host more than the host waited for room in its buffer."""
        return self.device_waited > self.host_waited

    def utilisation(self) -> dict[str, float]:
        """Busy share of every resource, all workers of the host together.

        At most 1: what a long epoch repeats is the difference of two short ones, which is some per cent off.
        """
        there = {name: max(self.seconds * (self.division.workers if name == HOST else 1), 1e-12) for name in self.busy}
        return {name: min(used / there[name], 1.0) for name, used in self.busy.items()}


def simulate(
    division: Division,
    times: PhaseTimes,
    batches: int,
    registry: Registry,
    seed: int | None = None,
    most: int = MOST_SIMULATED,
) -> Simulation:
    """The epoch; with ``seed`` durations vary as they were measured to, else each is its mean.

    ``most``: batches from which on a longer epoch repeats its middle.
    """
    most = max(most, 4 * division.lead)  # the middle comes after the beginning
    if batches <= most:
        return _Run(division, times, batches, registry, seed).result()
    shorter = most // 2 // division.overlap * division.overlap or most // 2
    longer = shorter + max(shorter // division.overlap, 1) * division.overlap
    first, second = (_Run(division, times, count, registry, seed).result() for count in (shorter, longer))
    more = (batches - longer) / max(longer - shorter, 1)

    def grown(a: float, b: float) -> float:
        return b + more * max(b - a, 0.0)

    waited = {name: grown(getattr(first, name), getattr(second, name)) for name in ("device_waited", "host_waited")}
    busy = {name: grown(first.busy.get(name, 0.0), used) for name, used in second.busy.items()}
    seconds = grown(first.seconds, second.seconds)
    return replace(second, batches=batches, seconds=seconds, busy=busy, **waited)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Running:
    operator: Operator
    batch: int
    remaining: float
    begin: float
    then: Callable[[int], None]  # of the batch

    def activity(self, now: float) -> Activity:
        return Activity(self.operator.key, self.batch, self.operator.occupies, self.begin, now)


class _Run:
    """One simulated epoch."""

    def __init__(
        self, division: Division, times: PhaseTimes, batches: int, registry: Registry, seed: int | None
    ) -> None:
        self._host, self._device = registry.host_route(), device_operators(registry, division.trainer, times)
        if (division.host_batches and not self._host) or (division.device_batches and not self._device):
            raise SpecError(f"division {division.words()!r} needs operators that are not registered")
        self._division, self._batches, self._times = division, batches, times
        if division.kind == "sequential":  # the trainer prepares all batches in captured steps
            self._times = replace(times, phases={**times.phases, **times.captured})
        elif division.elastic:
            self._times = times.in_step()
            self._device = device_operators(registry, division.trainer, self._times)
        self._random = None if seed is None else random.Random(seed)
        self._training = registry.training(division.trainer)
        before = max(BEFORE, 2 * division.lead) if division.elastic else 0
        self._epochs = -(-before // max(batches, 1)) or 1  # that are simulated; an elastic one follows as many
        self._schedule = DualBuffer(division, min(before, batches) or batches, upcoming=batches)
        self._now, self._running = 0.0, list[_Running]()
        self._used = dict.fromkeys((HOST, BUS, division.trainer), 0)
        self._activities: list[Activity] = []
        self._origin = 0.0  # when the epoch began
        self._device_busy = False
        self._pending: tuple[int, int] | None = None  # batch and operator that the device continues with
        self._waited = [0.0, 0.0]  # device for host, host for room
        self._own: dict[int, float] = {}  # batches that the device prepares now: when that began

    def result(self) -> Simulation:
        """Of an epoch; of an elastic division the mean of epochs that follow others, as many as few batches take."""
        for _ in range(self._epochs if self._division.elastic else 0):
            self._run()
            self._follow()
        begin, busy, waited = self._now, dict.fromkeys(self._used, 0.0), [0.0, 0.0]
        for remaining in reversed(range(self._epochs)):
            self._run()
            for activity in [*self._activities, *(running.activity(self._now) for running in self._running)]:
                for resource in activity.resources:
                    busy[resource] = busy.get(resource, 0.0) + activity.end - max(activity.begin, self._origin)
            waited = [before + more for before, more in zip(waited, self._waited, strict=True)]
            if remaining:
                self._follow()
        done = [
            replace(each, begin=each.begin - self._origin, end=each.end - self._origin) for each in self._activities
        ]
        return Simulation(
            self._division,
            self._batches,
            (self._now - begin) / self._epochs,
            {name: used / self._epochs for name, used in busy.items()},
            tuple(activity for activity in done if activity.batch < self._batches),
            waited[0] / self._epochs,
            waited[1] / self._epochs,
        )

    def _run(self) -> None:
        """Until all batches are trained; the host may continue with those of the next epoch."""
        while True:
            # Begin everything that can begin.
            if self._pending is not None:
                self._prepare(*self._pending)
            while not self._device_busy and (action := self._schedule.next_on_device()) is not None:
                what, batch = action
                first = self._training if what == "train" else self._device[0]
                if not self._free(first):
                    break
                self._schedule.begin_on_device(what, batch)
                self._device_busy = True
                if what == "train":
                    self._begin(first, batch, self._release_device)
                else:
                    self._prepare(batch, 0)
            while (self._host and self._free(self._host[1])) and (moved := self._schedule.begin_transfer()) is not None:
                self._begin(self._host[1], moved, lambda batch: self._schedule.complete(batch))
            while (self._host and self._free(self._host[0])) and (begun := self._schedule.begin_on_host()) is not None:
                self._begin(self._host[0], begun, lambda batch: self._schedule.complete(batch))
            if not self._running or (self._schedule.finished and not self._device_busy):
                break
            # To the next event.
            keys, host = tuple({running.operator.key for running in self._running}), self._used.get(HOST, 0)
            slow = {key: self._times.slowdown(key, keys, host) for key in keys}
            step = min(running.remaining * slow[running.operator.key] for running in self._running)
            if not self._device_busy and not self._schedule.finished:
                self._waited[0] += step
            idle = self._division.workers - host
            if self._division.host_batches and idle and self._schedule.host_has_work:
                self._waited[1] += step * idle / self._division.workers
            self._now += step
            for running in self._running:
                running.remaining -= step / slow[running.operator.key]
            ended = [running for running in self._running if running.remaining <= 1e-12 + 1e-9 * step]
            self._running = [running for running in self._running if running not in ended]
            for running in ended:
                for name in running.operator.occupies:
                    self._used[name] -= 1
                self._activities.append(running.activity(self._now))
                if self._division.elastic:
                    if running.operator in self._host:
                        self._schedule.took(
                            "host" if running.operator is self._host[0] else "bus", self._now - running.begin
                        )
                    elif running.operator.key == self._training.key:
                        begin = self._own.pop(running.batch, None)
                        self._schedule.took(
                            "given" if begin is None else "own", self._now - (running.begin if begin is None else begin)
                        )
                    else:
                        self._own.setdefault(running.batch, running.begin)
                running.then(running.batch)
        if not self._schedule.finished:
            raise SpecError(f"division {self._division.words()!r} came to a stop")

    def _follow(self) -> None:
        """Begin the next epoch."""
        for running in self._running:
            running.batch -= self._schedule.batches
        self._schedule = self._schedule.following(self._batches)
        self._origin, self._activities, self._waited = self._now, [], [0.0, 0.0]

    def _prepare(self, batch: int, step: int) -> None:
        """The device's operators one after another; between two of them the device may wait for the bus."""
        self._pending = None if self._free(self._device[step]) else (batch, step)
        if self._pending is not None:
            return

        def then(_: int) -> None:
            if step + 1 < len(self._device):
                self._prepare(batch, step + 1)
            else:
                self._schedule.complete(batch)
                self._device_busy = False

        self._begin(self._device[step], batch, then)

    def _release_device(self, _: int) -> None:
        self._device_busy = False

    def _free(self, operator: Operator) -> bool:
        for name in operator.occupies:
            if self._used.get(name, 0) >= (self._division.workers if name == HOST else 1):
                return False
        return True

    def _begin(self, operator: Operator, batch: int, then: Callable[[int], None]) -> None:
        for name in operator.occupies:
            self._used[name] = self._used.get(name, 0) + 1
        time = self._times.of(operator.key, self._division.workers)
        duration = time.mean
        if self._random is not None and time.std > 0.0:
            duration = max(self._random.gauss(time.mean, time.std), 0.1 * time.mean)
        self._running.append(_Running(operator, batch, duration, self._now, then))
