"""Divide the preparation of an epoch's batches between the host and the device that trains.

In order: :class:`Division` (how batches are divided), :class:`Registry` (which hardware does which phase),
:class:`PhaseTimes` (measured seconds), and :class:`DualBuffer`, which decides what host, bus and device do next. The
simulator and the executor drive the same :class:`DualBuffer`. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from weft.core.errors import SpecError
from weft.core.plain_data import PlainData

STRATEGIES = ("elastic", "fixed")


@dataclass(frozen=True)
class Division(PlainData):
    """How the batches of an epoch are divided: of ``host_batches + device_batches`` batches, one overlap.

    ``strategy="elastic"``: the host begins batches ahead, as many as arrive in time, and the device prepares every
    other batch right before it trains on it; the two counts are the expected shares, and ``lead`` is how far ahead the
    host begins until phases are measured. ``strategy="fixed"``: MorphGL's Algorithms 1 to 4 at the ratio of the counts;
    every overlap begins with the device's batches and ends with the host's.

    ``workers`` threads of the host prepare batches. ``host_buffer``: batches that the host may have begun and not yet
    handed to the bus. ``device_buffer``: batches that may be on the device ahead of the one in training. ``trainer``:
    the hardware that trains.

    Batches are trained in their order under every division, so a division changes no result.
    """

    host_batches: int
    device_batches: int
    workers: int = 1
    host_buffer: int = 0
    device_buffer: int = 0
    trainer: str = "gpu"
    strategy: str = "elastic"
    lead: int = 0

    def __post_init__(self) -> None:
        for name, low in (("host_batches", 0), ("device_batches", 0), ("workers", 1), ("lead", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise SpecError(f"division: {name}={value!r} must be a whole number, at least {low}")
        if not self.overlap:
            raise SpecError("division: host_batches and device_batches are both 0; one side has to prepare batches")
        if self.strategy not in STRATEGIES:
            raise SpecError(f"division: strategy={self.strategy!r} must be one of {', '.join(STRATEGIES)}")
        host_buffer = self.host_buffer or max(self.workers, self.host_batches)
        object.__setattr__(self, "host_buffer", host_buffer if self.host_batches else 0)
        object.__setattr__(self, "device_buffer", self.device_buffer or max(self.device_batches, 1))
        object.__setattr__(self, "lead", self.lead if self.elastic else 0)

    @property
    def overlap(self) -> int:
        """Batches of one overlap."""
        return self.host_batches + self.device_batches

    @property
    def divided(self) -> bool:
        """Whether both sides prepare batches."""
        return self.host_batches > 0 and self.device_batches > 0

    @property
    def elastic(self) -> bool:
        """Whether the side that prepares a batch is decided during training."""
        return self.divided and self.strategy == "elastic"

    @property
    def device_share(self) -> float:
        """Share of the batches that the trainer prepares itself."""
        return self.device_batches / self.overlap

    @property
    def pinned_batches(self) -> int:
        """The most prepared batches in pinned memory at once: the host's buffer and one in transfer."""
        return self.host_buffer + 1 if self.host_batches else 0

    @property
    def kind(self) -> str:
        """``"pipeline"`` (the host prepares all batches), ``"sequential"`` (the device does) or ``"dual buffer"``."""
        return "dual buffer" if self.divided else "pipeline" if self.host_batches else "sequential"

    def words(self) -> str:
        """In words, for a plan."""
        if not self.device_batches:
            return f"the host prepares all batches with {self.workers} workers (plain pipeline)"
        if not self.host_batches:
            return f"the {self.trainer} prepares all batches"
        buffers = f"buffers of {self.host_buffer} and {self.device_buffer}"
        if self.elastic:
            return (
                f"the host prepares as many batches with {self.workers} workers as are done in time, about "
                f"{self.host_batches} of {self.overlap}, and the {self.trainer} the others inside of its steps; "
                f"{buffers}"
            )
        return (
            f"of every {self.overlap} batches the {self.trainer} prepares {self.device_batches} and the host "
            f"{self.host_batches} with {self.workers} workers; {buffers}"
        )


# ---- Registry: which hardware does which phase, and which resources a phase occupies (MorphGL's Table III).

PHASES = ("batching", "transfer", "training")
HOST, BUS = "cpu", "pcie"  # the hardware that prepares batches in host memory, and what carries them to the trainer


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


Route = tuple[Operator, ...]  # the operators that a batch passes before training, in their order; empty: none


@dataclass(frozen=True)
class Registry:
    """Operators by phase and hardware, at most one each. The planner knows no hardware by name, only the registry."""

    operators: tuple[Operator, ...] = ()

    def __post_init__(self) -> None:
        keys = [operator.key for operator in self.operators]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise SpecError(f"{twice} is registered twice; give the operators of a phase different hardware")

    def registered(self, *operators: Operator) -> Registry:
        """With more operators; a second operator for the same phase and hardware is an error."""
        return Registry((*self.operators, *operators))

    def find(self, phase: str, hardware: str) -> Operator | None:
        """The operator for ``phase`` on ``hardware``, None if there is none."""
        key = f"{phase}_{hardware}"
        return next((operator for operator in self.operators if operator.key == key), None)

    def training(self, trainer: str) -> Operator:
        """The operator that trains on ``trainer``; a SpecError if there is none."""
        operator = self.find("training", trainer)
        if operator is None:
            trainers = ", ".join(each.hardware for each in self.operators if each.phase == "training") or "none"
            raise SpecError(f"nothing is registered to train on {trainer!r}; hardware that trains: {trainers}")
        return operator

    def host_route(self) -> Route:
        """Batching on the host, then a copy to the trainer; empty unless both are registered."""
        batching, transfer = self.find("batching", HOST), self.find("transfer", BUS)
        return (batching, transfer) if batching and transfer else ()

    def device_route(self, trainer: str) -> Route:
        """Batching by the trainer itself; empty unless it has an operator for that."""
        batching, transfer = self.find("batching", trainer), self.find("transfer", trainer)
        return () if batching is None else (batching, transfer) if transfer else (batching,)


def built_in() -> Registry:
    """What Weft has: a CPU and a GPU that prepare batches, copies by DMA or reads over UVA, training on the GPU."""
    return Registry((
        Operator("batching", "cpu", "weft.batches: compiled sampler and gather", ("cpu",)),
        Operator("transfer", "pcie", "copy from pinned memory (DMA)", ("pcie",)),
        Operator("batching", "gpu", "weft.batches: Triton sampler over UVA", ("gpu", "pcie")),
        Operator("transfer", "gpu", "gather over UVA", ("gpu", "pcie")),
        Operator("training", "gpu", "training step", ("gpu",)),
    ))  # fmt: skip


# ---- PhaseTimes: measured seconds of every phase of a batch, and how concurrent phases slow each other down.

HOST_BATCHING = "batching_cpu"
STALL = 4.0  # times the median of a phase

# How many times as long a phase takes while another runs, for pairs that a profile did not measure: an H200 with 14
# threads of the host (SAGE, benchmarks/results/division.json). Kernels that read over PCIe hold up the memory accesses
# of training; sampling waits for concurrent copies (from the phases of divided epochs).
INTERFERENCE: dict[str, dict[str, float]] = {
    "batching_cpu": {"transfer_pcie": 1.05, "batching_gpu": 1.02, "transfer_gpu": 1.03, "training_gpu": 1.03},
    "transfer_pcie": {"batching_cpu": 1.03, "transfer_gpu": 1.68},
    "batching_gpu": {"batching_cpu": 1.56, "training_gpu": 1.2, "transfer_pcie": 4.0},
    "transfer_gpu": {"batching_cpu": 1.2, "training_gpu": 1.25, "transfer_pcie": 1.94},
    "training_gpu": {"batching_cpu": 1.1, "transfer_pcie": 1.07, "batching_gpu": 1.8, "transfer_gpu": 3.6},
}
# Next to training, reads by the GPU over PCIe slow it down about 4 times (above). So a GPU prepares its batches
# inside of its captured steps: with 14 threads of the host, epochs on the products shape were 1.31 to 1.42 times as
# fast as with the better side alone (H200, SAGE, three runs).
# Inside of captured steps reads by all multiprocessors take nearly all of the bus: from the phases of divided epochs.
INSIDE: dict[str, dict[str, float]] = {"transfer_gpu": {"transfer_pcie": 1.1}, "transfer_pcie": {"transfer_gpu": 5.0}}


def typical(key: str, other: str) -> float:
    """How many times as long ``key`` takes while ``other`` runs on an H200; 1 if that is not known."""
    return INTERFERENCE.get(key, {}).get(other, 1.0)


@dataclass(frozen=True)
class PhaseTime(PlainData):
    """``mean`` and standard deviation of the seconds that a phase takes for one batch, over ``count`` batches."""

    mean: float
    std: float = 0.0
    count: int = 1

    def __post_init__(self) -> None:
        for name, value in (("mean", self.mean), ("std", self.std)):
            if not math.isfinite(value) or value < 0:
                raise SpecError(f"seconds of a phase: {name}={value!r} must be a number, at least 0")

    @classmethod
    def of(cls, seconds: Sequence[float]) -> PhaseTime:
        """Of measured seconds; stalls (:data:`STALL` times the median and more) do not count."""
        if not seconds:
            raise SpecError("a phase needs at least one measured batch")
        median = sorted(seconds)[len(seconds) // 2]
        seconds = [value for value in seconds if value <= STALL * median]
        mean = sum(seconds) / len(seconds)
        variance = sum((value - mean) ** 2 for value in seconds) / max(len(seconds) - 1, 1)
        return cls(mean, math.sqrt(variance), len(seconds))

    def scaled(self, factor: float) -> PhaseTime:
        """The same, ``factor`` times as long."""
        return PhaseTime(self.mean * factor, self.std * factor, self.count)


@dataclass(frozen=True)
class PhaseTimes(PlainData):
    """Measured phases by name (``batching_cpu``, ``transfer_pcie``, ``batching_gpu``, ``transfer_gpu``, ...).

    ``batching_cpu`` is of one worker with no other at work; with w workers each takes ``1 + crowding * (w - 1)`` times
    as long. ``interference[a][b]``: how many times as long phase a takes while phase b runs (1 if not given).
    ``bytes``: of one prepared batch. ``captured``: phases of the trainer inside captured steps, without the launches of
    kernels one by one. With training among them they are the parts of one step that was measured as a whole.
    ``workers``: threads of the host that were at work when its interference was measured; fewer take less of the
    memory's bandwidth (0: not known, all the same). ``inside``: as ``interference``, of phases inside captured steps,
    if it differs there.
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
        for name, factors in (*self.interference.items(), *self.inside.items()):
            for other, factor in factors.items():
                if not math.isfinite(factor) or factor <= 0:
                    raise SpecError(f"interference of {other} with {name}: {factor!r} must be above 0")

    def of(self, key: str, workers: int = 1) -> PhaseTime:
        """A phase, that of the host with ``workers`` at work; a SpecError if it was not measured."""
        if key not in self.phases:
            raise SpecError(f"phase {key!r} was not measured; measured: {', '.join(self.phases) or 'none'}")
        time = self.phases[key]
        return time.scaled(1.0 + self.crowding * (workers - 1)) if key == HOST_BATCHING else time

    def slowdown(self, key: str, concurrent: Sequence[str], host: int | None = None) -> float:
        """How many times as long ``key`` takes while others run; ``host``: threads of the host among them."""
        factors = self.interference.get(key)
        if not factors:
            return 1.0
        # Threads share the memory's bandwidth, which some of them nearly fill: between all of it and in proportion.
        part = 1.0 if host is None or not self.workers else min(host / self.workers, 1.0) ** 0.5
        return math.prod(
            1.0 + (factors.get(other, 1.0) - 1.0) * (part if HOST_BATCHING in (key, other) else 1.0)
            for other in set(concurrent)
            if other != key
        )

    def in_step(self) -> PhaseTimes:
        """Where the trainer prepares its batches inside captured steps, and trains on the host's batches as well.

        Phases of a captured step are not launched one by one. Phases that are launched may wait for busy threads of the
        host, which captured ones do not: no more of that interference counts than is typical.
        """
        captured = {key: time for key, time in self.captured.items() if not key.startswith("training")}
        inside = {
            key: {**self.interference.get(key, {}), **self.inside.get(key, {})} for key in (*captured, *self.inside)
        }
        for key in captured:
            if HOST_BATCHING in inside[key]:
                inside[key][HOST_BATCHING] = min(inside[key][HOST_BATCHING], typical(key, HOST_BATCHING))
        return replace(self, phases={**self.phases, **captured}, interference={**self.interference, **inside})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        optional = ("captured", "workers", "inside")
        return {name: value for name, value in super().to_dict().items() if value or name not in optional}


@dataclass(frozen=True)
class SharedBus:
    """Seconds of a captured step, of its reads and its training, and of a copy, each alone.

    ``training_slower``: times as long as alone that training takes during copies; ``copy_slower``: copies during it.
    """

    step: float
    reads: float
    training: float
    copy: float
    training_slower: float = 1.0
    copy_slower: float = 1.0

    def factors(self, step: float, copy: float) -> tuple[float, float]:
        """How many times as long reads take during copies, and copies during reads, from a concurrent step and copy.

        The step takes longer by its training and its reads. In the rest of it copies run as during training:

            copy alone / copy = during / slower + (1 - during) / copy_slower,    during = reads / step
        """
        if not min(self.reads, self.copy, step, copy) > 0:
            return 1.0, 1.0
        rest = self.step - self.reads + self.training * (self.training_slower - 1.0)
        reads = max(step - rest, self.reads)
        during = min(reads / step, 1.0)
        pace = self.copy / copy - (1.0 - during) / self.copy_slower
        slower = MOST_SLOWER if pace * MOST_SLOWER <= during else max(during / pace, 1.0)
        return reads / self.reads, slower


MOST_SLOWER = 10.0  # times as long as alone that copies are taken to take during reads: they may stop altogether

# ---- WorkAssignment: which batch the host begins next under an elastic division.
#
# This is decided during training and not by one ratio: epochs of one ratio differ by 10 %, so that trials do not find
# the best one, and the speed of a host changes from minute to minute. On an H200 the result is the fastest of all
# ratios tried or within 2 % of it, and the GPU waits 0.04 to 0.13 ms per batch; at a fixed ratio it waited 0.41 to
# 0.54.

NEWEST = 0.15  # weight of the last measured seconds of a phase
LARGEST = 64.0  # gap
SPARE = 1.0  # batches before its turn at which a batch of the host is to have arrived
EPSILON = 1e-6
ASSIGNED_PHASES = ("host", "bus", "given", "own")


@dataclass
class WorkAssignment:
    """The host begins one of every ``gap`` batches, ``lead`` batches ahead of the one in training.

    Phases, in seconds per batch: ``host`` (one worker makes a batch), ``bus`` (it is copied to the device), ``given``
    (the device trains on it) and ``own`` (the device prepares a batch itself and trains on it). While all workers
    together make a batch and the bus carries it, the device trains on it and on ``gap - 1`` of its own:

        max(host / workers, copy) = given + (gap - 1) * own

    That is MorphGL's Equation 6 for one resource against the other. It is solved again after every measured phase, so
    the share follows the pace of both sides within an epoch. Until all phases are measured, ``gap`` and ``first`` are
    as given. ``first``: how far ahead the host begins at the start of an epoch, when the device has none of its batches
    and all workers begin at once. ``seconds["copy"]``: the fastest ``bus`` so far, since other copies wait for the
    reads of the device without being late.
    """

    workers: int
    gap: float
    first: float
    seconds: dict[str, float] = field(default_factory=dict)
    lead: float = field(init=False)
    last: float = -math.inf  # position of the last batch that was begun, before rounding

    def __post_init__(self) -> None:
        self.lead = self.first
        self._solve()

    def next(self, trained: int) -> int:
        """The batch that a free worker begins if ``trained`` batches are trained or in training."""
        return math.ceil(self._position(trained))

    def begun(self, batch: int, trained: int) -> None:
        """A worker has begun ``batch``: :meth:`next`, or the first after it that was not begun."""
        self.last = max(self._position(trained), batch - 1.0 + EPSILON)

    def took(self, phase: str, seconds: float) -> None:
        """A phase of a batch took so long."""
        before = self.seconds.get(phase, seconds)
        self.seconds[phase] = before + NEWEST * (seconds - before)
        if phase == "bus":
            self.seconds["copy"] = min(self.seconds.get("copy", seconds), seconds)
        self._solve()

    def _position(self, trained: int) -> float:
        return max(self.last + self.gap, trained + self.lead if trained else self.first)

    def _solve(self) -> None:
        if any(self.seconds.get(phase, 0.0) <= 0.0 for phase in ASSIGNED_PHASES):
            return
        host, bus, given, own = (self.seconds[phase] for phase in ASSIGNED_PHASES)
        period = max(host / self.workers, self.seconds.get("copy", bus), given)
        self.gap = min(1.0 + (period - given) / own, LARGEST)
        self.lead = (host + bus) * self.gap / period + SPARE
        self.first = (host + bus) / own + SPARE


# ---- DualBuffer: what host, bus and device do next with the batches of an epoch.


class State(Enum):
    """Where a batch is."""

    WAITING = 0
    ON_HOST = 1  # in work there
    IN_HOST_BUFFER = 2
    ON_BUS = 3
    ON_DEVICE = 4  # in preparation there
    READY = 5
    TRAINED = 6  # or in training


AFTER = {State.ON_HOST: State.IN_HOST_BUFFER, State.ON_BUS: State.READY, State.ON_DEVICE: State.READY}


class DualBuffer:
    """Two buffers, prepared batches in host memory and batches on the device, under ``division``.

    A *fixed* division follows MorphGL's Algorithms 1 to 4. An overlap has three phases. Filling: the device prepares
    its batches of the overlap, the host its own. Blocking: one side is late, and the other continues instead of
    waiting: the device prepares ahead, or takes over a batch that the host has not begun. Flushing: batches are trained
    while the bus carries those of the host to the device. An *elastic* division has no such phases: the device prepares
    the next batch unless the host has begun it. At the end of an epoch its host continues with batches of the next one,
    numbered on from the last of this epoch; they wait in host memory.

    Unlike in MorphGL, batches are trained in their order, and only batches less than ``device_buffer`` ahead of the
    one to be trained may be on the device, so there is always room for the next one.

    ``seconds``: of the phases of an elastic division, from earlier epochs. ``upcoming``: batches of the next epoch.
    ``taken_over``: batches that the device prepared for the host. Methods that begin something return None to wait.
    """

    def __init__(
        self, division: Division, batches: int, seconds: Mapping[str, float] | None = None, upcoming: int = 0
    ) -> None:
        self.division, self.batches = division, batches
        self.upcoming = upcoming if division.elastic else 0
        self.taken_over = 0
        count = batches + self.upcoming
        self._state = [State.WAITING] * count
        self._by_device = [division.elastic or i % division.overlap < division.device_batches for i in range(count)]
        self.assignment = None
        if division.elastic:
            gap = division.overlap / division.host_batches
            self.assignment = WorkAssignment(division.workers, gap, float(division.lead), dict(seconds or {}))
        self._next_host = self._next_device = 0  # no batch of that side before it is waiting
        self._trained = 0
        self._held = 0  # by the host: in work or in its buffer
        self._filling = not division.elastic

    @property
    def finished(self) -> bool:
        """Whether every batch is trained, or in training."""
        return self._trained == self.batches

    def following(self, upcoming: int = 0) -> DualBuffer:
        """Of an elastic division: the schedule of the next epoch, with what the host has begun of it.

        If the host waited for the next epoch to begin, the GPU would prepare the first 10 to 20 batches alone, and the
        host would be idle at the end: 6.43 ms per batch against 5.48, 6.00 and 5.86 (H200, products shape, SAGE, 14
        threads; the hosts of the three runs differ by 11 %); the simulator predicts 4.7 %.
        """
        assert self.assignment is not None
        schedule = DualBuffer(self.division, self.upcoming, self.assignment.seconds, upcoming)
        assert schedule.assignment is not None
        for batch, state in enumerate(self._state[self.batches :]):
            if state is not State.WAITING:
                schedule._state[batch], schedule._by_device[batch] = state, False
                schedule._held += 1
        schedule.assignment.last = self.assignment.last - self.batches
        return schedule

    def state(self, batch: int) -> State:
        """Where ``batch`` is."""
        return self._state[batch]

    def prepared_by_device(self, batch: int) -> bool:
        """Whether the device prepares ``batch``, or has taken it over."""
        return self._by_device[batch]

    def took(self, phase: str, seconds: float) -> None:
        """A phase of a batch took so long (see :class:`WorkAssignment`); without effect unless elastic."""
        if self.assignment is not None:
            self.assignment.took(phase, seconds)

    def begin_on_host(self) -> int | None:
        """The next batch for a free worker; None if the buffer is full or no batch remains."""
        batch = None if self._held >= self.division.host_buffer else self._next_of_host()
        if batch is None:
            return None
        if self.assignment is not None:
            self.assignment.begun(batch, self._trained)
            self._by_device[batch] = False
        self._state[batch] = State.ON_HOST
        self._held += 1
        return batch

    @property
    def host_has_work(self) -> bool:
        """Whether a batch of the host's has not begun."""
        return self._next_of_host() is not None

    def _next_of_host(self) -> int | None:
        if self.assignment is not None:
            batches = range(self.assignment.next(self._trained), len(self._state))
            return next((batch for batch in batches if self._state[batch] is State.WAITING), None)
        while self._next_host < self.batches:
            if not self._by_device[self._next_host] and self._state[self._next_host] is State.WAITING:
                return self._next_host
            self._next_host += 1
        return None

    def begin_transfer(self) -> int | None:
        """The first batch of the host's buffer that there is room for on the device."""
        for batch in range(self._trained, self._window()):
            if self._state[batch] is State.IN_HOST_BUFFER:
                self._state[batch] = State.ON_BUS
                self._held -= 1
                return batch
        return None

    def next_on_device(self) -> tuple[str, int] | None:
        """``("prepare", batch)`` or ``("train", batch)``; None: wait for the host or the bus. Nothing is begun."""
        if self.finished:
            return None
        batch, state = self._trained, self._state[self._trained]
        if self.division.elastic:
            return ("train", batch) if state is State.READY else ("prepare", batch) if state is State.WAITING else None
        window = self._window()
        while self._next_device < window and not self._is_own_waiting(self._next_device):
            self._next_device += 1
        ahead = self._next_device if self._next_device < window else None
        if state is State.READY and not (self._filling and ahead is not None):
            return "train", batch
        if ahead is None and self.division.divided and state not in (State.IN_HOST_BUFFER, State.ON_BUS):
            behind_host = range(max(self._next_host, batch), window)
            ahead = next((other for other in behind_host if self._state[other] is State.WAITING), None)
        return None if ahead is None else ("prepare", ahead)

    def begin_on_device(self, action: str, batch: int) -> None:
        """Begin what :meth:`next_on_device` answered."""
        if action == "prepare":
            self._expect(batch, State.WAITING)
            self.taken_over += not self._by_device[batch]
            self._by_device[batch] = True
            self._state[batch] = State.ON_DEVICE
            return
        self._expect(batch, State.READY)
        self._state[batch] = State.TRAINED
        self._trained += 1
        self._filling = not self.division.elastic and self._is_own_waiting(self._trained)

    def complete(self, batch: int) -> None:
        """What was begun with ``batch`` is done, on the host, the bus or the device."""
        self._expect(batch, *AFTER)
        self._state[batch] = AFTER[self._state[batch]]

    def _expect(self, batch: int, *states: State) -> None:
        if self._state[batch] not in states:
            names = " or ".join(state.name.lower() for state in states)
            raise SpecError(f"batch {batch} is {self._state[batch].name.lower()}, not {names}")

    def _is_own_waiting(self, batch: int) -> bool:
        return batch < self.batches and self._by_device[batch] and self._state[batch] is State.WAITING

    def _window(self) -> int:
        """Batches before this one may be on the device. An elastic device prepares none of its own ahead."""
        if not self.division.elastic:
            return min(self._trained + self.division.device_buffer, self.batches)
        room = self.division.device_buffer
        for batch in range(self._trained, self.batches):
            room -= not self._by_device[batch]
            if room < 0:
                return batch
        return self.batches
