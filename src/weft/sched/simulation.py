"""The outcome of a simulated queue: when each task and group ran, and the figures that compare policies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One task: when it arrived, was started and ended."""

    id: str
    group: str
    arrival: float
    start: float
    end: float
    due: float = math.inf

    @property
    def completion_seconds(self) -> float:
        """Job completion time: from arrival to end."""
        return self.end - self.arrival

    @property
    def queuing_seconds(self) -> float:
        """From arrival to start."""
        return self.start - self.arrival


@dataclass(frozen=True, slots=True)
class GroupRun:
    """One group: the worker it ran on, its members, its bytes, from when to when."""

    id: str
    device: str
    worker: int
    members: tuple[str, ...]
    bytes: int
    start: float
    end: float
    why: str = ""


@dataclass(frozen=True)
class Metrics:
    """The figures of one simulation. Seconds, bytes, and the utilisation as a share of all devices."""

    tasks: int
    refused: int
    makespan: float
    mean_jct: float
    p95_jct: float
    mean_queuing: float
    p95_queuing: float
    utilisation: float
    peak_bytes: int
    late: int
    decisions: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Simulation:
    """A simulated queue. ``busy_seconds``: seconds of a fully used device; ``peak_bytes``: of one device."""

    policy: str
    tasks: tuple[TaskRun, ...]
    groups: tuple[GroupRun, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    budget_bytes: int = 0
    devices: int = 1
    busy_seconds: float = 0.0
    peak_bytes: int = 0
    decisions: int = 0

    @property
    def makespan(self) -> float:
        """From the first arrival to the last end."""
        if not self.tasks:
            return 0.0
        return max(run.end for run in self.tasks) - min(run.arrival for run in self.tasks)

    def metrics(self) -> Metrics:
        """The figures."""
        completion = [run.completion_seconds for run in self.tasks]
        queuing = [run.queuing_seconds for run in self.tasks]
        span = self.makespan * self.devices
        return Metrics(
            tasks=len(self.tasks),
            refused=len(self.refused),
            makespan=self.makespan,
            mean_jct=_mean(completion),
            p95_jct=percentile(completion, 0.95),
            mean_queuing=_mean(queuing),
            p95_queuing=percentile(queuing, 0.95),
            utilisation=self.busy_seconds / span if span else 0.0,
            peak_bytes=self.peak_bytes,
            late=sum(run.end > run.due + 1e-9 for run in self.tasks),
            decisions=self.decisions,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the figures, every group, and what was refused."""
        groups = [{**asdict(group), "members": list(group.members)} for group in self.groups]
        metrics = self.metrics().to_dict()
        return {"policy": self.policy, "metrics": metrics, "groups": groups, "refused": dict(self.refused)}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
