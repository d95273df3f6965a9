"""PhaseTimes: seconds of every phase of a batch, as measured alone, and how concurrent phases slow each other down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weft.core.division.typical_interference import typical
from weft.core.errors import SpecError

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
