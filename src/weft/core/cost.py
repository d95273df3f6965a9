"""Cost: bytes by lifetime and seconds by resource of a training step, predicted or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core.errors import SpecError
from weft.core.plain_data import PlainData

RESOURCES = ("gpu", "cpu", "pcie", "link", "disk")
SIZES = ("peak_bytes", "reserved_bytes", "total_bytes", "training_bytes")  # what more of a resident value adds to


def resource_kind(resource: str) -> str:
    """The kind of a resource: of ``"gpu"`` and of ``"gpu:1"`` it is ``"gpu"``."""
    return resource.partition(":")[0]


@dataclass(frozen=True)
class Cost(PlainData):
    """Bytes and seconds of one epoch of a group of tasks.

    ``peak_bytes``: the most that tensors take at once; ``reserved_bytes``: with what the allocator holds beyond
    that; ``total_bytes``: with the CUDA context and libraries as well, which is what a device must have.
    ``process_bytes``: on a CPU, of the whole process: Python, torch, kernels, and what the system's allocator holds.
    ``bytes``: the peak by kind of value (``graph``, ``weight``, ``activation``, ...). ``training_bytes``: the most that
    tensors take in a step without an evaluation.

    ``seconds``: of one epoch by resource, each of one of the kinds in :data:`RESOURCES` (``gpu``, or ``gpu:1`` where
    there are several). Each resource counts for as long as nothing else is charged: they add up to
    :attr:`epoch_seconds`. On a GPU ``cpu`` is the time in which the device waits for the host.
    ``families``: the same seconds by family of operator (``spmm``, ``attention``, ``scatter``, ``matmul``,
    ``pointwise``, ``launch``), which is what calibration corrects; ``phases``: by phase of the step.

    ``launches``: kernels of one epoch, 0 if not known; :attr:`turn_seconds` is the mean time of one on a GPU.

    ``measured``: whether it was measured or predicted; ``corrected``: whether a prediction went through calibration;
    ``uncorrected``: its families before that, which the next calibration is fitted to.
    """

    peak_bytes: int = 0
    reserved_bytes: int = 0
    total_bytes: int = 0
    bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    families: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    measured: bool = False
    corrected: bool = False
    uncorrected: Mapping[str, float] = field(default_factory=dict)
    process_bytes: int = 0
    training_bytes: int = 0
    launches: float = 0.0

    def __post_init__(self) -> None:
        for resource in self.seconds:
            if resource_kind(resource) not in RESOURCES:
                raise SpecError(f"seconds of {resource!r}: a resource is one of {', '.join(RESOURCES)}")

    @property
    def epoch_seconds(self) -> float:
        """Seconds of one epoch."""
        return sum(self.seconds.values())

    def seconds_of(self, kind: str) -> float:
        """Seconds of one epoch that resources of ``kind`` take."""
        return sum(value for resource, value in self.seconds.items() if resource_kind(resource) == kind)

    @property
    def turn_seconds(self) -> float:
        """Mean seconds of a kernel on a GPU; 0 if launches are not known."""
        return self.seconds_of("gpu") / self.launches if self.launches else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**super().to_dict(), "epoch_seconds": self.epoch_seconds}
