"""Who prepares which batch of an epoch: hardware and operators, measured phases, the schedule of two buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from weft.core.batch_sizes import MOST_BUCKETS
from weft.core.errors import SpecError

# ---- Division: how the batches of an epoch are divided between the host and the trainer, and the buffers between
# them.


@dataclass(frozen=True)
class Division:
    """Overlaps of batches: ``device_batches`` that the trainer prepares itself, then ``host_batches`` of the host.

    ``workers`` threads of the host prepare batches; ``host_buffer``: how many the host may have begun and not yet
    handed to the bus; ``device_buffer``: how many may lie on the device ahead of the one that is trained.
    ``takes_over``: the trainer may prepare a batch that the host has not begun, rather than idle. ``trainer``: the
    hardware that trains. ``beside``: it prepares while it trains, so that there are no phases of filling and flushing,
    and the batches of the two sides alternate. ``in_step``: it prepares each of its batches right before it trains on
    it, in one step with that, and none ahead; they alternate, too. ``lead``: the first batches of an epoch are the
    device's, while the host works on its first ones. ``elastic``: which side prepares a batch is decided during
    training (:mod:`weft.core.division`; only with ``in_step``): the numbers of batches are what is expected, and
    ``lead`` how far ahead the host begins at first. ``buckets``: how many sizes the batches of captured steps are
    padded to (:mod:`weft.core.batch_sizes`).

    Batches are trained in their order whoever prepares them, so a division changes no number.
    """

    host_batches: int
    device_batches: int
    workers: int = 1
    host_buffer: int = 0
    device_buffer: int = 0
    takes_over: bool = False
    trainer: str = "gpu"
    beside: bool = False
    buckets: int = 1
    in_step: bool = False
    lead: int = 0
    elastic: bool = False

    def __post_init__(self) -> None:
        for name, low in (("host_batches", 0), ("device_batches", 0), ("workers", 1), ("lead", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise SpecError(f"division: {name}={value!r} must be a whole number, at least {low}")
        if isinstance(self.buckets, bool) or self.buckets not in range(1, MOST_BUCKETS + 1):
            raise SpecError(f"division: buckets={self.buckets!r} must be a whole number from 1 to {MOST_BUCKETS}")
        if not self.host_batches + self.device_batches:
            raise SpecError("division: host_batches and device_batches are both 0; one side has to prepare batches")
        if self.beside and self.in_step:
            raise SpecError("division: beside and in_step exclude each other; batches are prepared in one way")
        if self.elastic and not self.in_step:
            raise SpecError("division: elastic needs in_step; the device prepares what the host has not begun")
        host = self.host_buffer or max(self.workers, self.host_batches)
        object.__setattr__(self, "host_buffer", host if self.host_batches else 0)
        object.__setattr__(self, "device_buffer", self.device_buffer or max(self.device_batches, 1))
        object.__setattr__(self, "takes_over", self.takes_over and self.divided)
        object.__setattr__(self, "lead", self.lead if self.divided else 0)
        object.__setattr__(self, "elastic", self.elastic and self.divided)

    @property
    def overlap(self) -> int:
        """Batches of one overlap."""
        return self.host_batches + self.device_batches

    @property
    def divided(self) -> bool:
        """Whether both sides prepare batches."""
        return self.host_batches > 0 and self.device_batches > 0

    @property
    def alternates(self) -> bool:
        """Whether the batches of the two sides alternate, rather than follow one another within an overlap."""
        return self.beside or self.in_step

    @property
    def device_share(self) -> float:
        """Share of the batches that the trainer prepares itself."""
        return self.device_batches / self.overlap

    @property
    def pinned_batches(self) -> int:
        """The most prepared batches in pinned memory at once: the host's buffer and one on its way."""
        return self.host_buffer + 1 if self.host_batches else 0

    @property
    def kind(self) -> str:
        """``"pipeline"`` (the host prepares all batches), ``"sequential"`` (the device does) or ``"dual buffer"``."""
        return "dual buffer" if self.divided else "pipeline" if self.host_batches else "sequential"

    def on_device(self, place: int) -> bool:
        """Whether the trainer prepares the batch at ``place``, counted from the first of this run."""
        if place < self.lead:
            return True
        place -= self.lead
        if not self.alternates:
            return place % self.overlap < self.device_batches
        before, after = (one * self.device_batches // self.overlap for one in (place, place + 1))
        return after > before

    def words(self) -> str:
        """In words, for a plan."""
        return self._who() + (f"; batches padded to one of {self.buckets} sizes" if self.buckets > 1 else "")

    def _who(self) -> str:
        if not self.device_batches:
            return f"the host prepares all batches with {self.workers} workers (plain pipeline)"
        if not self.host_batches:
            return f"the {self.trainer} prepares all batches"
        if self.elastic:
            return (
                f"the host prepares as many batches with {self.workers} workers as are done in time, about "
                f"{self.host_batches} of {self.overlap}, and the {self.trainer} the others inside of its steps; "
                f"buffers of {self.host_buffer} and {self.device_buffer}"
            )
        how = " inside of its steps" if self.in_step else " beside training" if self.beside else ""
        first = f"; the first {self.lead} of an epoch are the {self.trainer}'s" if self.lead else ""
        return (
            f"of every {self.overlap} batches the {self.trainer} prepares {self.device_batches}{how} and the host "
            f"{self.host_batches} with {self.workers} workers; buffers of {self.host_buffer} and {self.device_buffer}"
            f"{first}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Division:
        """The inverse of :meth:`to_dict`; unknown keys are ignored, so that older versions can read newer files."""
        known = {one.name for one in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})


# ---- Registry of {phase, hardware, operator}: what prepares, transfers and trains batches, and what each occupies.
#
# MorphGL's Table III. Hardware joins by registering operators; a planner reads routes off the registry and knows no
# hardware by name.

PHASES = ("batching", "transfer", "training")
HOST, BUS = "cpu", "pcie"  # who prepares batches in host memory, and what carries them to the trainer


@dataclass(frozen=True)
class Operator:
    """``name`` does ``phase`` on ``hardware`` and occupies every resource of ``occupies`` while it runs.

    Batching is sampling and, on the host, gathering; transfer brings features to the trainer.
    """

    phase: str
    hardware: str
    name: str
    occupies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise SpecError(f"operator {self.name!r}: phase={self.phase!r} must be one of {', '.join(PHASES)}")
        if not self.hardware or not self.name:
            raise SpecError(f"operator {self.name!r} on {self.hardware!r}: needs a name and the hardware it runs on")
        object.__setattr__(self, "occupies", tuple(self.occupies) or (self.hardware,))

    @property
    def key(self) -> str:
        """The name of the phase on this hardware, such as ``batching_cpu``."""
        return f"{self.phase}_{self.hardware}"


@dataclass(frozen=True)
class Route:
    """How a batch reaches the trainer: who begins it, and the operators before training in their order."""

    hardware: str
    operators: tuple[Operator, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of its phases."""
        return tuple(one.key for one in self.operators)


@dataclass(frozen=True)
class Registry:
    """Operators by phase and hardware, at most one each."""

    operators: tuple[Operator, ...] = ()

    def __post_init__(self) -> None:
        keys = [one.key for one in self.operators]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise SpecError(f"{twice} is registered twice; replace the operator with Registry.replaced")

    def registered(self, *operators: Operator) -> Registry:
        """With more operators; hardware that is known under a phase already is an error."""
        return Registry((*self.operators, *operators))

    def replaced(self, *operators: Operator) -> Registry:
        """With these operators in place of those for the same phase and hardware."""
        keys = {one.key for one in operators}
        return Registry((*(one for one in self.operators if one.key not in keys), *operators))

    def find(self, phase: str, hardware: str) -> Operator | None:
        """The operator for ``phase`` on ``hardware``, None if there is none."""
        return next((one for one in self.operators if (one.phase, one.hardware) == (phase, hardware)), None)

    def trainers(self) -> tuple[str, ...]:
        """Hardware that trains."""
        return tuple(one.hardware for one in self.operators if one.phase == "training")

    def training(self, trainer: str) -> Operator:
        """The operator that trains on ``trainer``; a SpecError if there is none."""
        found = self.find("training", trainer)
        if found is None:
            known = ", ".join(self.trainers()) or "none"
            raise SpecError(f"nothing is registered to train on {trainer!r}; hardware that trains: {known}")
        return found

    def host_route(self) -> Route | None:
        """Batching on the host, then a copy to the trainer; None unless both are registered."""
        return _route(HOST, self.find("batching", HOST), self.find("transfer", BUS))

    def device_route(self, trainer: str) -> Route | None:
        """Batching by the trainer itself; None unless it has an operator for that."""
        batching, transfer = self.find("batching", trainer), self.find("transfer", trainer)
        return None if batching is None else _route(trainer, *filter(None, (batching, transfer)))

    def beside(self, trainer: str) -> bool:
        """Whether ``trainer`` prepares batches while it trains: its operators for that leave it free."""
        route = self.device_route(trainer)
        training = set(self.training(trainer).occupies)
        return route is not None and all(training.isdisjoint(one.occupies) for one in route.operators)

    def keys(self, trainer: str) -> tuple[str, ...]:
        """Names of all phases that training on ``trainer`` may have, the host's first and training last."""
        routes: Iterable[Route | None] = (self.host_route(), self.device_route(trainer))
        return (*(key for route in routes if route for key in route.keys), self.training(trainer).key)


def _route(hardware: str, *operators: Operator | None) -> Route | None:
    found = tuple(one for one in operators if one is not None)
    return Route(hardware, found) if len(found) == len(operators) else None


def built_in(beside: bool = False) -> Registry:
    """What Weft has: a CPU and a GPU that prepare batches, copies by DMA or reads over UVA, training on the GPU.

    ``beside``: the GPU samples and gathers on a stream of its own while it trains, by kernels that leave most of its
    multiprocessors to the training step; else it does one after the other, as MorphGL assumes.
    """
    gpu = ("gpu preparing", "pcie") if beside else ("gpu", "pcie")
    return Registry((
        Operator("batching", "cpu", "weft.batches: compiled sampler and gather", ("cpu",)),
        Operator("transfer", "pcie", "copy from pinned memory (DMA)", ("pcie",)),
        Operator("batching", "gpu", "weft.batches: Triton sampler over UVA", gpu),
        Operator("transfer", "gpu", "gather over UVA", gpu),
        Operator("training", "gpu", "training step", ("gpu",)),
    ))  # fmt: skip


# ---- How many times as long phases typically take beside each other, for pairs that were not measured.
#
# As profiled on an H200 with 14 threads of the host (SAGE, benchmarks/results/division.json).

# Reads over PCIe by kernels hold up the memory accesses of training. Sampling beside copies waits for them: from the
# phases of divided epochs.
INTERFERENCE: dict[str, dict[str, float]] = {
    "batching_cpu": {"transfer_pcie": 1.05, "batching_gpu": 1.02, "transfer_gpu": 1.03, "training_gpu": 1.03},
    "transfer_pcie": {"batching_cpu": 1.03, "transfer_gpu": 1.68},
    "batching_gpu": {"batching_cpu": 1.56, "training_gpu": 1.2, "transfer_pcie": 4.0},
    "transfer_gpu": {"batching_cpu": 1.2, "training_gpu": 1.25, "transfer_pcie": 1.94},
    "training_gpu": {"batching_cpu": 1.1, "transfer_pcie": 1.07, "batching_gpu": 1.8, "transfer_gpu": 3.6},
}
# Inside of captured steps reads by all multiprocessors take nearly all of the bus: from the phases of divided epochs.
INSIDE: dict[str, dict[str, float]] = {
    "transfer_gpu": {"transfer_pcie": 1.1},
    "transfer_pcie": {"transfer_gpu": 5.0},
}


def typical(key: str, beside: str) -> float:
    """How many times as long ``key`` takes while ``beside`` runs; 1 if nothing is known of them."""
    return INTERFERENCE.get(key, {}).get(beside, 1.0)


# ---- PhaseTimes: seconds of every phase of a batch, as measured alone, and how concurrent phases slow each other
# down.

HOST_BATCHING = "batching_cpu"
EPOCH = "epoch"  # not a phase: a whole epoch, measured among them
STALL = 4.0  # times the median of a phase


@dataclass(frozen=True)
class PhaseTime:
    """``mean`` and standard deviation of the seconds that a phase takes for one batch, over ``count`` batches."""

    mean: float
    std: float = 0.0
    count: int = 1

    def __post_init__(self) -> None:
        for name, value in (("mean", self.mean), ("std", self.std)):
            if not math.isfinite(value) or value < 0:
                raise SpecError(f"seconds of a phase: {name}={value!r} must be a number, at least 0")

    @classmethod
    def of(cls, seconds: Sequence[float], stall: float = STALL) -> PhaseTime:
        """Of measured seconds; those of a few stalls (``stall`` times the median and more) do not count."""
        if not seconds:
            raise SpecError("a phase needs at least one measured batch")
        median = sorted(seconds)[len(seconds) // 2]
        seconds = [value for value in seconds if value <= stall * median]
        mean = sum(seconds) / len(seconds)
        variance = sum((value - mean) ** 2 for value in seconds) / max(len(seconds) - 1, 1)
        return cls(mean, math.sqrt(variance), len(seconds))

    def scaled(self, factor: float) -> PhaseTime:
        """The same, ``factor`` times as long."""
        return PhaseTime(self.mean * factor, self.std * factor, self.count)


@dataclass(frozen=True)
class PhaseTimes:
    """Measured phases by name (``batching_cpu``, ``transfer_pcie``, ``batching_gpu``, ``transfer_gpu``, ...).

    ``batching_cpu`` is of one worker with no other at work; with w workers each takes ``1 + crowding * (w - 1)`` times
    as long. ``interference[a][b]``: how many times as long phase a takes while phase b runs (1 if not given).
    ``bytes``: of one prepared batch. ``captured``: phases of the trainer where it prepares all batches, in captured
    steps: without the launches of kernels one by one. With training among them they are those of one step that was
    measured as a whole, and follow one another. ``workers``: threads of the host that were at work when its
    interference with others was measured; fewer take less of the memory's bandwidth (0: not known, all the same).
    ``inside``: as ``interference``, of phases inside of captured steps, where it differs: reads by all multiprocessors
    take nearly all of the bus, and those beside training do not.
    """

    phases: Mapping[str, PhaseTime]
    interference: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    crowding: float = 0.0
    bytes: int = 0
    captured: Mapping[str, PhaseTime] = field(default_factory=dict)
    workers: int = 0
    inside: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.crowding) or self.crowding < 0:
            raise SpecError(f"crowding={self.crowding!r} must be a number, at least 0")
        for name, others in (*self.interference.items(), *self.inside.items()):
            for other, factor in others.items():
                if not math.isfinite(factor) or factor <= 0:
                    raise SpecError(f"interference of {other} with {name}: {factor!r} must be above 0")

    def of(self, key: str, workers: int = 1) -> PhaseTime:
        """A phase, that of the host with ``workers`` at work; a SpecError if it was not measured."""
        if key not in self.phases:
            raise SpecError(f"phase {key!r} was not measured; measured: {', '.join(self.phases) or 'none'}")
        found = self.phases[key]
        return found.scaled(1.0 + self.crowding * (workers - 1)) if key == HOST_BATCHING else found

    def slowdown(self, key: str, others: Sequence[str], host: int | None = None) -> float:
        """How many times as long ``key`` takes while ``others`` run; ``host``: threads of the host among them."""
        mine = self.interference.get(key)
        if not mine:
            return 1.0
        # Threads share the memory's bandwidth, which some of them nearly fill: between all of it and in proportion.
        part = 1.0 if host is None or not self.workers else min(host / self.workers, 1.0) ** 0.5
        return math.prod(
            1.0 + (mine.get(other, 1.0) - 1.0) * (part if HOST_BATCHING in (key, other) else 1.0)
            for other in set(others)
            if other != key
        )

    def scaled(self, **factors: float) -> PhaseTimes:
        """The same with some phases ``factor`` times as long."""
        phases, captured = (
            {key: one.scaled(factors.get(key, 1.0)) for key, one in some.items()}
            for some in (self.phases, self.captured)
        )
        return replace(self, phases=phases, captured=captured)

    def eased(self, shares: Mapping[str, float]) -> PhaseTimes:
        """The same with some phases slowed down by others by a share of what was measured; 0: not at all."""
        found = (
            {
                key: {other: 1.0 + (factor - 1.0) * shares.get(key, 1.0) for other, factor in others.items()}
                for key, others in some.items()
            }
            for some in (self.interference, self.inside)
        )
        interference, inside = found
        return replace(self, interference=interference, inside=inside) if shares else self

    def for_one_side(self) -> PhaseTimes:
        """Where the trainer prepares all batches: its phases as captured steps have them."""
        return replace(self, phases={**self.phases, **self.captured}) if self.captured else self

    def in_step(self) -> PhaseTimes:
        """Where the trainer prepares its batches inside of captured steps, and trains on others as well.

        Phases of a captured step are not launched one by one. Beside busy threads of the host those that are launched
        may wait for the host, which they do not here: no more of it counts than is typical.
        """
        inside = {key: one for key, one in self.captured.items() if not key.startswith("training")}
        beside = {
            key: {**self.interference.get(key, {}), **self.inside.get(key, {})} for key in (*inside, *self.inside)
        }
        for key in inside:
            if HOST_BATCHING in beside[key]:
                beside[key][HOST_BATCHING] = min(beside[key][HOST_BATCHING], typical(key, HOST_BATCHING))
        return replace(self, phases={**self.phases, **inside}, interference={**self.interference, **beside})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        phases = {key: asdict(one) for key, one in self.phases.items()}
        interference = {key: dict(others) for key, others in self.interference.items()}
        about = {"interference": interference, "crowding": self.crowding, "bytes": self.bytes}
        captured = {key: asdict(one) for key, one in self.captured.items()}
        inside = {key: dict(others) for key, others in self.inside.items()}
        more = {"captured": captured, "workers": self.workers, "inside": inside}
        return {"phases": phases, **about, **{name: value for name, value in more.items() if value}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PhaseTimes:
        """The inverse of :meth:`to_dict`."""
        phases = {key: PhaseTime(**one) for key, one in data["phases"].items()}
        captured = {key: PhaseTime(**one) for key, one in data.get("captured", {}).items()}
        about = (data.get("interference", {}), data.get("crowding", 0.0), data.get("bytes", 0))
        return cls(phases, *about, captured, data.get("workers", 0), data.get("inside", {}))


# ---- Claims: which batch the host begins next, where the device prepares every batch that the host has not begun.
#
# The host begins one of every ``gap`` batches, so far ahead of the one to be trained that it arrives in time; the
# device
# prepares the others inside of its steps. While the host makes a batch, all workers together, and the bus carries it,
# the
# device trains on one batch of the host's and prepares and trains on ``gap - 1`` of its own:
#
#     max(host / workers, copy) = given + (gap - 1) * own
#
# That is MorphGL's Equation 6 for one resource against the other. It is solved anew whenever a phase was measured, so
# that the share follows from how fast both sides turn out to be, within an epoch, and no ratio has to be right.

NEWEST = 0.15  # weight of the last measured seconds of a phase among those before
LARGEST = 64.0  # gap
SPARE = 1.0  # places before its turn at which a batch is to have arrived
EPSILON = 1e-6
CLAIM_PHASES = ("host", "bus", "given", "own")


@dataclass
class Claims:
    """``gap`` between batches of the host's and ``first`` of them, until phases were measured.

    ``lead``: how far ahead the host begins. Of an epoch's first batches it is less, since the device has none of the
    host's to train on, and all workers begin at once.

    Phases, in seconds per batch: ``host`` (one worker makes a batch), ``bus`` (it is carried to the device), ``given``
    (the device trains on it) and ``own`` (the device prepares a batch itself and trains on it). Also among ``seconds``,
    ``copy``, the fastest ``bus`` so far: others share the bus with reads of the device, and wait for these without
    being late.
    """

    workers: int
    gap: float
    first: float
    seconds: dict[str, float] = field(default_factory=dict)
    lead: float = field(init=False)
    _last: float = -math.inf  # place of the last batch that was begun, before rounding

    def __post_init__(self) -> None:
        self.lead = self.first
        self._solve()

    def next(self, trained: int) -> int:
        """The place that a free worker begins if ``trained`` batches are trained or in training."""
        return math.ceil(self._wanted(trained))

    def begun(self, place: int, trained: int) -> None:
        """A worker has begun the batch at ``place``: :meth:`next`, or the first after it that nobody had begun."""
        self._last = max(self._wanted(trained), place - 1.0 + EPSILON)

    def follow(self, former: Claims, batches: int) -> None:
        """Go on from ``former``, those of an epoch of ``batches`` that has just ended, and began some of this one."""
        self._last = former._last - batches

    def took(self, phase: str, seconds: float) -> None:
        """A phase of a batch took so long."""
        before = self.seconds.get(phase, seconds)
        self.seconds[phase] = before + NEWEST * (seconds - before)
        if phase == "bus":
            self.seconds["copy"] = min(self.seconds.get("copy", seconds), seconds)
        self._solve()

    def _wanted(self, trained: int) -> float:
        return max(self._last + self.gap, trained + self.lead if trained else self.first)

    def _solve(self) -> None:
        if any(self.seconds.get(phase, 0.0) <= 0.0 for phase in CLAIM_PHASES):
            return
        host, bus, given, own = (self.seconds[phase] for phase in CLAIM_PHASES)
        period = max(host / self.workers, self.seconds.get("copy", bus), given)
        self.gap = min(1.0 + (period - given) / own, LARGEST)
        self.lead = (host + bus) * self.gap / period + SPARE
        self.first = (host + bus) / own + SPARE


# ---- DualBuffer: decide what host, bus and device do next with the batches of an epoch (MorphGL's Algorithms 1 to 4).
#
# Two buffers: prepared batches in host memory, and batches on the device. An *overlap* has three phases. Filling: the
# device prepares its batches of the overlap, the host its own. Blocking: one side is late, and the other goes on
# instead
# of idling. Flushing: batches are trained while the bus carries those of the host to the device.
#
# Unlike MorphGL, batches are trained in their order: an overlap begins with the device's batches and ends with the
# host's, and only batches less than ``device_buffer`` ahead of the one to be trained may be on the device, so the next
# one always has a place there. The same object drives the simulator and the executor; it reads no clock.
#
# Towards the end of an epoch an elastic division's host would be idle. It goes on with the batches of the next one,
# which
# wait in its buffer: places behind the last of this epoch.


class State(Enum):
    """Where a batch is."""

    WAITING = 0
    ON_HOST = 1  # in work there
    IN_HOST_BUFFER = 2
    ON_BUS = 3
    ON_DEVICE = 4  # in preparation there
    READY = 5
    TRAINED = 6  # or in training


@dataclass
class Blocking:
    """How often a side was late at the end of filling, and how many batches changed sides."""

    host_late: int = 0
    device_late: int = 0
    taken_over: int = 0


class DualBuffer:
    """The state of ``batches`` batches under ``division``; methods that begin something return None to wait.

    ``seconds``: of the phases of an elastic division, as earlier epochs left them. ``upcoming``: batches of the epoch
    after this one, which the host may begin if the division is elastic.
    """

    def __init__(
        self, division: Division, batches: int, seconds: Mapping[str, float] | None = None, upcoming: int = 0
    ) -> None:
        self.division, self.batches = division, batches
        self.upcoming = upcoming if division.elastic else 0
        self.blocking = Blocking()
        self._state = [State.WAITING] * (batches + self.upcoming)
        self.claims = _claims(division, seconds or {}) if division.elastic else None
        self._by_device = [division.elastic or division.on_device(place) for place in range(len(self._state))]
        self._next_host = self._next_device = 0  # no batch of that side before it is waiting
        self._trained = 0
        self._held = 0  # by the host: in work or in its buffer
        self._filling = not division.alternates

    @property
    def finished(self) -> bool:
        """Whether every batch is trained, or in training."""
        return self._trained == self.batches

    def following(self, upcoming: int = 0) -> DualBuffer:
        """Of an elastic division: the schedule of the epoch after this one, with what the host has begun of it."""
        assert self.claims is not None
        found = DualBuffer(self.division, self.upcoming, self.claims.seconds, upcoming)
        assert found.claims is not None
        for place, state in enumerate(self._state[self.batches :]):
            if state is not State.WAITING:
                found._state[place], found._by_device[place] = state, False
                found._held += 1
        found.claims.follow(self.claims, self.batches)
        return found

    @property
    def phase(self) -> str:
        """``"filling"`` or ``"flushing"``."""
        return "filling" if self._filling else "flushing"

    def state(self, batch: int) -> State:
        """Where ``batch`` is."""
        return self._state[batch]

    def prepared_by_device(self, batch: int) -> bool:
        """Whether the device prepares ``batch``, or has taken it over."""
        return self._by_device[batch]

    # ---- the host ------------------------------------------------------------------------------------

    def begin_on_host(self) -> int | None:
        """The next batch for a free worker; None if the buffer is full or none is left."""
        if self._held >= self.division.host_buffer:
            return None
        place = self._advance_host()
        if place is None:
            return None
        if self.claims is not None:
            self.claims.begun(place, self._trained)
            self._by_device[place] = False
        self._state[place] = State.ON_HOST
        self._held += 1
        return place

    @property
    def host_has_work(self) -> bool:
        """Whether a batch of the host's has not begun."""
        return self._advance_host() is not None

    def _advance_host(self) -> int | None:
        if self.claims is not None:
            places = range(self.claims.next(self._trained), len(self._state))
            return next((place for place in places if self._state[place] is State.WAITING), None)
        while self._next_host < self.batches:
            place = self._next_host
            if not self._by_device[place] and self._state[place] is State.WAITING:
                return place
            self._next_host += 1
        return None

    def finished_on_host(self, batch: int) -> None:
        """The host has prepared ``batch``."""
        self._move(batch, State.ON_HOST, State.IN_HOST_BUFFER)

    # ---- the bus -------------------------------------------------------------------------------------

    def begin_transfer(self) -> int | None:
        """The first batch of the host's buffer that has a place on the device."""
        place = self.next_transfer()
        if place is not None:
            self._state[place] = State.ON_BUS
            self._held -= 1
        return place

    def next_transfer(self) -> int | None:
        """What :meth:`begin_transfer` would begin."""
        places = range(self._trained, self._window())
        return next((place for place in places if self._state[place] is State.IN_HOST_BUFFER), None)

    def finished_transfer(self, batch: int) -> None:
        """``batch`` has arrived on the device."""
        self._move(batch, State.ON_BUS, State.READY)

    # ---- the device ----------------------------------------------------------------------------------

    def next_on_device(self) -> tuple[str, int] | None:
        """``("prepare", batch)`` or ``("train", batch)``; None: wait for the host or the bus. Nothing is begun."""
        if self.finished:
            return None
        if self.division.beside:
            return ("train", self._trained) if self._state[self._trained] is State.READY else None
        if self.division.in_step:
            return self._in_step()
        own = self._next_own()
        if self._filling and own is not None:
            return "prepare", own
        if self._state[self._trained] is State.READY:
            return "train", self._trained
        return self._while_blocked(own)

    def _in_step(self) -> tuple[str, int] | None:
        """Nothing ahead: prepare the next batch if it is the device's, or the host has not begun it."""
        batch = self._trained
        if self._state[batch] is State.READY:
            return "train", batch
        mine = self._by_device[batch] or self.division.takes_over
        return ("prepare", batch) if mine and self._state[batch] is State.WAITING else None

    def next_beside(self) -> int | None:
        """The batch that the device is to prepare beside training; None: wait. Nothing is begun."""
        if self.finished:
            return None
        own = self._next_own()
        if own is not None or self._state[self._trained] is State.READY:
            return own
        blocked = self._while_blocked(None)
        return None if blocked is None else blocked[1]

    @property
    def device_has_work(self) -> bool:
        """Whether a batch waits that the device prepares, or may take over."""
        waiting = range(self._trained, self.batches)
        takes_over = self.division.takes_over
        return any(self._state[p] is State.WAITING and (takes_over or self._by_device[p]) for p in waiting)

    def _while_blocked(self, own: int | None) -> tuple[str, int] | None:
        """The next batch is not there: prepare ahead, or take over one that the host has not begun."""
        if own is not None:
            return "prepare", own
        waits_for_bus = self._state[self._trained] in (State.IN_HOST_BUFFER, State.ON_BUS)
        taken = None if waits_for_bus or not self.division.takes_over else self._next_to_take_over()
        return None if taken is None else ("prepare", taken)

    def begin_on_device(self, action: str, batch: int) -> None:
        """Begin what :meth:`next_on_device` answered."""
        if action == "train":
            self._move(batch, State.READY, State.TRAINED)
            self._end_filling()
            self._trained += 1
            self._filling = not self.division.alternates and self._is_own_waiting(self._trained)
            return
        if not self._by_device[batch]:
            self._by_device[batch] = True
            self.blocking.taken_over += 1
        self._move(batch, State.WAITING, State.ON_DEVICE)

    def finished_on_device(self, batch: int) -> None:
        """The device has prepared ``batch``."""
        self._move(batch, State.ON_DEVICE, State.READY)

    def _end_filling(self) -> None:
        """Once per overlap: note which side was late."""
        if self._filling and self.division.divided:
            full = min(self.division.host_batches, self.division.host_buffer)
            late = self._held < min(full, self._left_of_host())
            waits = self._held >= self.division.host_buffer and self.host_has_work
            self.blocking.host_late += late
            self.blocking.device_late += waits
        self._filling = False

    def _left_of_host(self) -> int:
        last = min(self._trained + self.division.overlap, self.batches)
        return sum(not self._by_device[place] for place in range(self._trained, last))

    def _next_own(self) -> int | None:
        """The device's first batch that waits and has a place."""
        while self._next_device < self._window():
            if self._is_own_waiting(self._next_device):
                return self._next_device
            self._next_device += 1
        return None

    def _next_to_take_over(self) -> int | None:
        places = range(max(self._next_host, self._trained), self._window())
        return next((place for place in places if self._state[place] is State.WAITING), None)

    def _is_own_waiting(self, place: int) -> bool:
        return place < self.batches and self._by_device[place] and self._state[place] is State.WAITING

    def _window(self) -> int:
        """Batches before this one may be on the device. Those of the device's own steps are not there ahead of them."""
        if not self.division.in_step:
            return min(self._trained + self.division.device_buffer, self.batches)
        room = self.division.device_buffer
        for place in range(self._trained, self.batches):
            room -= not self._by_device[place]
            if room < 0:
                return place
        return self.batches

    def _move(self, batch: int, before: State, after: State) -> None:
        if self._state[batch] is not before:
            raise SpecError(f"batch {batch} is {self._state[batch].name.lower()}, not {before.name.lower()}")
        self._state[batch] = after

    def took(self, phase: str, seconds: float) -> None:
        """A phase of a batch took so long (:mod:`weft.core.division`); nothing comes of it unless elastic."""
        if self.claims is not None:
            self.claims.took(phase, seconds)


def _claims(division: Division, seconds: Mapping[str, float]) -> Claims:
    return Claims(division.workers, division.overlap / division.host_batches, float(division.lead), dict(seconds))


# ---- How reads inside of steps and copies share the bus, from whole steps and copies that ran beside each other.
#
# A step beside copies takes longer by its training, as measured by itself, and by its reads. In the rest of a step
# copies
# go on as beside training, so what a copy took on average says how slowly it goes on during the reads:
#
#     copy alone / copy = during / slower + (1 - during) / beside training,    during = reads / step

MOST_SLOWER = 10.0  # times as long as alone that copies are taken to take beside reads: they may not go on at all


@dataclass(frozen=True)
class SharedBus:
    """Seconds of a step, of its reads and its training, and of a copy, each alone.

    ``training_slower``: times as long as alone that training takes beside copies; ``copy_slower``: copies beside it.
    """

    step: float
    reads: float
    training: float
    copy: float
    training_slower: float = 1.0
    copy_slower: float = 1.0

    def factors(self, step: float, copy: float) -> tuple[float, float]:
        """How many times as long reads take beside copies, and copies beside reads: from both beside each other."""
        if not min(self.reads, self.copy, step, copy) > 0:
            return 1.0, 1.0
        rest = self.step - self.reads + self.training * (self.training_slower - 1.0)
        reads = max(step - rest, self.reads)
        during = min(reads / step, 1.0)
        pace = self.copy / copy - (1.0 - during) / self.copy_slower
        slower = MOST_SLOWER if pace * MOST_SLOWER <= during else max(during / pace, 1.0)
        return reads / self.reads, slower
