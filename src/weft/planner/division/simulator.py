"""Simulator: an epoch under a division, event by event in continuous time, on host, bus, device and two buffers.

Every activity occupies resources exclusively (the host has one place per worker). While activities run at once they
slow each other down by the measured interference; an event is the end of one. Where the trainer prepares all batches it
does so in captured steps (of batches of one size: see :mod:`weft.core.batch_sizes`), whose phases have times of
their own and follow one another. The bus is shared where it was measured how copies and the device's reads slow each
other down. Results are per batch, so that epochs of different lengths compare. Of an elastic division it is an epoch
that follows another: the host has begun some of its batches while that one ended, as it begins some of the next.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from weft.core.division import BUS, HOST, Division, DualBuffer, Operator, PhaseTimes, Registry
from weft.core.errors import SpecError

# ---- Seconds that a batch occupies each resource, by the share of batches that the trainer prepares itself.
#
# With a share s of the batches on the device's route, a resource is busy for ``host + s * (device - host)`` seconds
# per
# batch; the busiest one bounds the throughput of every schedule. Minimising that bound over s is MorphGL's Equation 6:
# for a ratio of 1 : x, with x = s / (1 - s), the three terms of the equation are the loads of PCIe, GPU and CPU.

READS = "pcie reads"  # of the bus, by the trainer itself, beside copies


@dataclass(frozen=True)
class Load:
    """Seconds per batch on one resource: of a batch that the host prepares, and of one that the device prepares."""

    host: float
    device: float

    def at(self, share: float) -> float:
        """With that share of the batches on the device's route."""
        return self.host + share * (self.device - self.host)


def device_operators(registry: Registry, trainer: str, times: PhaseTimes) -> tuple[Operator, ...]:
    """The operators of ``trainer`` that prepare batches, none if it cannot.

    They hold the bus, unless it was measured how copies and its own reads slow each other down: reads in random places
    of much memory take longer than the bus needs for them, and then both run at the same time.
    """
    host, device = registry.host_route(), registry.device_route(trainer)
    if device is None or host is None:
        return device.operators if device else ()
    copying, reading = host.keys[-1], device.keys[-1]
    measured = all(other in times.interference.get(key, {}) for key, other in ((copying, reading), (reading, copying)))
    if not measured:
        return device.operators
    return tuple(
        replace(one, occupies=tuple(READS if name == BUS else name for name in one.occupies))
        for one in device.operators
    )


def step_operators(registry: Registry, trainer: str, times: PhaseTimes) -> tuple[Operator, ...]:
    """The same where ``trainer`` prepares inside of its steps: they occupy it, and the bus as they do otherwise."""
    training = registry.training(trainer).occupies
    return tuple(
        replace(one, occupies=(*training, *(name for name in one.occupies if name in (BUS, READS))))
        for one in device_operators(registry, trainer, times.in_step())
    )


def loads(times: PhaseTimes, registry: Registry, trainer: str, workers: int, in_step: bool = False) -> dict[str, Load]:
    """The load of every resource; the host's is divided by its workers. ``in_step``: as :class:`Division` has it."""
    host, training = registry.host_route(), registry.training(trainer)
    times = times.in_step() if in_step else times
    device = (step_operators if in_step else device_operators)(registry, trainer, times)
    found: dict[str, list[float]] = {}
    for side, operators in enumerate((host.operators if host else (), device)):
        for operator in (*operators, training):
            for resource in operator.occupies:
                seconds = times.of(operator.key, workers).mean
                found.setdefault(resource, [0.0, 0.0])[side] += seconds / (workers if resource == HOST else 1)
    return {resource: Load(*sides) for resource, sides in found.items()}


def bound(by_resource: Mapping[str, Load], share: float) -> float:
    """Seconds per batch that no schedule with that share goes below."""
    return max(load.at(share) for load in by_resource.values())


MOST_SIMULATED = 240  # batches; a longer epoch repeats its middle
BEFORE = 64  # batches of the epoch before, at most: its end is what matters


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
    """What became of an epoch of ``batches`` batches: seconds, busy seconds by resource, and who waited for whom.

    ``activities`` are those that were simulated, all of a short epoch, the beginning of a long one; those that were
    begun while the epoch before ended begin before 0.
    """

    division: Division
    batches: int
    seconds: float
    busy: dict[str, float]
    activities: tuple[Activity, ...]
    device_waited: float = 0.0
    host_waited: float = 0.0
    host_late: int = 0
    device_late: int = 0
    taken_over: int = 0

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

        Never more than all: what a long epoch repeats is the difference of two short ones, which is some per cent off.
        """
        there = {name: max(self.seconds * (self.division.workers if name == HOST else 1), 1e-12) for name in self.busy}
        return {name: min(used / there[name], 1.0) for name, used in self.busy.items()}


@dataclass
class _Running:
    operator: Operator
    batch: int
    left: float
    begin: float
    then: Callable[[int], None]  # of the batch


@dataclass
class _Clock:
    now: float = 0.0
    running: list[_Running] = field(default_factory=list)


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
    most = max(most, 4 * division.lead)  # the middle is behind the beginning
    if batches <= most:
        return _Run(division, times, batches, registry, seed).result()
    shorter = most // 2 // division.overlap * division.overlap or most // 2
    longer = shorter + max(shorter // division.overlap, 1) * division.overlap
    first, second = (_Run(division, times, count, registry, seed).result() for count in (shorter, longer))
    return _extended(first, second, batches)


def _extended(first: Simulation, second: Simulation, batches: int) -> Simulation:
    """A long epoch from two short ones: what the longer one has more repeats."""
    more = (batches - second.batches) / max(second.batches - first.batches, 1)

    def grown(a: float, b: float) -> float:
        return b + more * max(b - a, 0.0)

    busy = {name: grown(first.busy.get(name, 0.0), used) for name, used in second.busy.items()}
    waited = {
        name: grown(getattr(first, name), getattr(second, name)) for name in ("device_waited", "host_waited")
    }  # fmt: skip
    counts = {
        name: round(grown(getattr(first, name), getattr(second, name)))
        for name in ("host_late", "device_late", "taken_over")
    }
    seconds = grown(first.seconds, second.seconds)
    return Simulation(second.division, batches, seconds, busy, second.activities, **waited, **counts)  # type: ignore[arg-type]


class _Run:
    """One simulated epoch."""

    def __init__(
        self, division: Division, times: PhaseTimes, batches: int, registry: Registry, seed: int | None
    ) -> None:
        one_side = division.kind == "sequential" and division.buckets == 1
        self._division, self._batches = division, batches
        self._times = times.for_one_side() if one_side else times.in_step() if division.in_step else times
        self._random = None if seed is None else random.Random(seed)
        self._training = registry.training(division.trainer)
        in_turn = one_side and self._training.key in times.captured
        self._beside = division.beside and not in_turn
        before = max(BEFORE, 2 * division.lead) if division.elastic else 0
        self._epochs = -(-before // max(batches, 1)) or 1  # that are simulated; of an elastic one as many come before
        first = min(before, batches) or batches
        self._schedule = DualBuffer(replace(division, beside=self._beside), first, upcoming=batches)
        host, device = registry.host_route(), registry.device_route(division.trainer)
        if (division.host_batches and host is None) or (division.device_batches and device is None):
            raise SpecError(f"division {division.words()!r} needs operators that are not registered")
        self._host = host.operators if host else ()
        operators = step_operators if division.in_step else device_operators
        self._device = operators(registry, division.trainer, times)
        self._clock, self._used = _Clock(), dict.fromkeys((HOST, BUS, division.trainer), 0)
        self._activities: list[Activity] = []
        self._origin = 0.0  # when the epoch began
        self._device_busy = self._preparing = False
        self._pending: tuple[int, int] | None = None  # batch and operator that the device is to go on with
        self._waited = [0.0, 0.0]  # device for host, host for room
        self._own: dict[int, float] = {}  # batches that the device prepares now: when that began

    def result(self) -> Simulation:
        """Of an epoch; of an elastic division the mean of epochs that follow others, as many as few batches take."""
        for _ in range(self._epochs if self._division.elastic else 0):
            self._run()
            self._follow()
        begin, busy, waited = self._clock.now, dict.fromkeys(self._used, 0.0), [0.0, 0.0]
        for left in reversed(range(self._epochs)):
            self._run()
            self._add_busy(busy)
            waited = [before + more for before, more in zip(waited, self._waited, strict=True)]
            if left:
                self._follow()
        seconds = (self._clock.now - begin) / self._epochs
        busy = {name: used / self._epochs for name, used in busy.items()}
        done = [replace(one, begin=one.begin - self._origin, end=one.end - self._origin) for one in self._activities]
        own = tuple(one for one in done if one.batch < self._batches)
        blocking = self._schedule.blocking
        return Simulation(
            self._division, self._batches, seconds, busy, own, waited[0] / self._epochs, waited[1] / self._epochs,
            blocking.host_late, blocking.device_late, blocking.taken_over,
        )  # fmt: skip

    def _add_busy(self, busy: dict[str, float]) -> None:
        """Seconds of this epoch by resource; of what has begun and not ended, until now."""
        begun = [_ended(one, self._clock.now) for one in self._clock.running]
        for one in [*self._activities, *begun]:
            for resource in one.resources:
                busy[resource] = busy.get(resource, 0.0) + one.end - max(one.begin, self._origin)

    def _run(self) -> None:
        """Until all batches are trained; the host may go on with those of the next epoch."""
        while True:
            self._dispatch()
            if not self._clock.running or (self._schedule.finished and not self._device_busy):
                break
            self._advance()
        if not self._schedule.finished:
            raise SpecError(f"division {self._division.words()!r} came to a stop")

    def _follow(self) -> None:
        """Begin the epoch after the one that has ended."""
        for one in self._clock.running:
            one.batch -= self._schedule.batches
        self._schedule = self._schedule.following(self._batches)
        self._origin, self._activities, self._waited = self._clock.now, [], [0.0, 0.0]

    # ---- beginning what can begin --------------------------------------------------------------------

    def _dispatch(self) -> None:
        self._dispatch_device()
        if self._beside:
            self._dispatch_beside()
        self._dispatch_bus()
        while self._host and self._free(self._host[0]) and (batch := self._schedule.begin_on_host()) is not None:
            self._begin(self._host[0], batch, lambda done: self._schedule.finished_on_host(done))

    def _dispatch_bus(self) -> None:
        while (self._host and self._free(self._host[1])) and (batch := self._schedule.begin_transfer()) is not None:
            self._begin(self._host[1], batch, self._schedule.finished_transfer)

    def _dispatch_beside(self) -> None:
        """Preparation beside training; where both need the bus, the batch that is trained first goes first."""
        batch, other = self._schedule.next_beside(), self._schedule.next_transfer()
        if self._preparing or batch is None or not self._free(self._device[0]) or self._pending is not None:
            return
        if other is not None and other < batch and "pcie" in self._device[0].occupies:
            return
        self._schedule.begin_on_device("prepare", batch)
        self._preparing = True
        self._prepare(batch, 0)

    def _dispatch_device(self) -> None:
        if self._pending is not None:
            self._prepare(*self._pending)
        while not self._device_busy and (action := self._schedule.next_on_device()) is not None:
            what, batch = action
            first = self._training if what == "train" else self._device[0]
            if not self._free(first):
                return
            self._schedule.begin_on_device(what, batch)
            self._device_busy = True
            if what == "train":
                self._begin(first, batch, lambda _: self._release_device())
            else:
                self._prepare(batch, 0)

    def _prepare(self, batch: int, place: int) -> None:
        """The device's operators one after another; between two of them the device may wait for the bus."""
        self._pending = None if self._free(self._device[place]) else (batch, place)
        if self._pending is not None:
            return

        def then(_: int) -> None:
            if place + 1 < len(self._device):
                self._prepare(batch, place + 1)
            else:
                self._schedule.finished_on_device(batch)
                self._release_preparing()

        self._begin(self._device[place], batch, then)

    def _release_device(self) -> None:
        self._device_busy = False

    def _release_preparing(self) -> None:
        if self._beside:
            self._preparing = False
        else:
            self._device_busy = False

    def _free(self, operator: Operator) -> bool:
        for name in operator.occupies:  # noqa: SIM110 - asked three times per event
            if self._used.get(name, 0) >= self._places(name):
                return False
        return True

    def _places(self, resource: str) -> int:
        return self._division.workers if resource == HOST else 1

    def _begin(self, operator: Operator, batch: int, then: Callable[[int], None]) -> None:
        for name in operator.occupies:
            self._used[name] = self._used.get(name, 0) + 1
        self._clock.running.append(_Running(operator, batch, self._duration(operator.key), self._clock.now, then))

    def _duration(self, key: str) -> float:
        time = self._times.of(key, self._division.workers)
        if self._random is None or time.std == 0.0:
            return time.mean
        return max(self._random.gauss(time.mean, time.std), 0.1 * time.mean)

    # ---- to the next event ---------------------------------------------------------------------------

    def _advance(self) -> None:
        running, keys = self._clock.running, {one.operator.key for one in self._clock.running}
        others, host = tuple(keys), self._used.get(HOST, 0)
        slow = {key: self._times.slowdown(key, others, host) for key in keys}
        step = min(one.left * slow[one.operator.key] for one in running)
        self._count_waiting(step)
        self._clock.now += step
        for one in running:
            one.left -= step / slow[one.operator.key]
        ended = [one for one in running if one.left <= 1e-12 + 1e-9 * step]
        self._clock.running = [one for one in running if one not in ended]
        for one in ended:
            self._end(one)

    def _end(self, one: _Running) -> None:
        for name in one.operator.occupies:
            self._used[name] -= 1
        self._activities.append(_ended(one, self._clock.now))
        if self._division.elastic:
            self._tell(one)
        one.then(one.batch)

    def _tell(self, one: _Running) -> None:
        """What the executor measures of an elastic division: of steps that prepare their batch the whole."""
        key, now = one.operator.key, self._clock.now
        if one.operator in self._host:
            self._schedule.took("host" if one.operator is self._host[0] else "bus", now - one.begin)
        elif key == self._training.key:
            begin = self._own.pop(one.batch, None)
            self._schedule.took("given" if begin is None else "own", now - (one.begin if begin is None else begin))
        else:
            self._own.setdefault(one.batch, one.begin)

    def _count_waiting(self, step: float) -> None:
        if not self._device_busy and not self._schedule.finished:
            self._waited[0] += step
        idle = self._division.workers - self._used.get(HOST, 0)
        if self._division.host_batches and idle and self._schedule.host_has_work:
            self._waited[1] += step * idle / self._division.workers


def _ended(one: _Running, now: float) -> Activity:
    return Activity(one.operator.key, one.batch, one.operator.occupies, one.begin, now)


# ---- Check a schedule against MorphGL's constraints: hardware (Equation 2), dependencies (3) and buffers (4).

EPSILON = 1e-9


def violations(simulation: Simulation, registry: Registry) -> list[str]:
    """What the schedule breaks, in words; empty if it keeps to every constraint."""
    return [*_hardware(simulation), *_dependencies(simulation, registry), *_buffers(simulation, registry)]


def most_open(spans: Sequence[tuple[float, float]]) -> int:
    """The most spans open at one time; one that begins as another ends does not overlap it."""
    events = [(begin, 1) for begin, _ in spans] + [(end - EPSILON, -1) for _, end in spans]
    return max(accumulate(change for _, change in sorted(events)), default=0)


def _hardware(simulation: Simulation) -> list[str]:
    by_resource: dict[str, list[tuple[float, float]]] = {}
    for one in simulation.activities:
        for resource in one.resources:
            if one.end - one.begin > EPSILON:
                by_resource.setdefault(resource, []).append((one.begin, one.end))
    places = {HOST: simulation.division.workers}
    return [
        f"{resource} runs {most_open(spans)} phases at once"
        for resource, spans in by_resource.items()
        if most_open(spans) > places.get(resource, 1)
    ]


def _dependencies(simulation: Simulation, registry: Registry) -> list[str]:
    ends = _ends(simulation.activities)
    training, found = registry.training(simulation.division.trainer).key, []
    for batch in range(max(ends, default=-1) + 1):
        phases = ends.get(batch, [])
        if [one.key for one in phases][-1:] != [training]:
            found.append(f"batch {batch} is not trained last")
        found += [
            f"batch {batch}: {later.key} begins before {earlier.key} ends"
            for earlier, later in pairwise(phases)
            if later.begin < earlier.end - EPSILON
        ]
    trained = [one.batch for one in sorted(simulation.activities, key=lambda one: one.begin) if one.key == training]
    return found if trained == sorted(trained) else [*found, "batches are not trained in their order"]


def _ends(activities: Sequence[Activity]) -> dict[int, list[Activity]]:
    """The phases of every batch in the order of their ends."""
    found: dict[int, list[Activity]] = {}
    for one in sorted(activities, key=lambda one: (one.end, one.begin)):
        found.setdefault(one.batch, []).append(one)
    return found


def _buffers(simulation: Simulation, registry: Registry) -> list[str]:
    """At no time more batches between two phases than the buffer between them holds."""
    host, training = registry.host_route(), registry.training(simulation.division.trainer).key
    in_host, on_device = [], []
    for phases in _ends(simulation.activities).values():
        by_key = {one.key: one for one in phases}
        if host and host.keys[0] in by_key and host.keys[1] in by_key:
            in_host.append((by_key[host.keys[0]].end, by_key[host.keys[1]].begin))
        if training in by_key and len(phases) > 1:
            on_device.append((phases[-2].end, by_key[training].begin))
    division, found = simulation.division, []
    for name, spans, most in (
        ("host", in_host, division.host_buffer),
        ("device", on_device, division.device_buffer),
    ):
        held = most_open([span for span in spans if span[1] > span[0] + EPSILON])
        if held > most:
            found.append(f"the {name} buffer holds {held} batches of {most}")
    return found
