"""Seconds that a batch occupies each resource, by the share of batches that the trainer prepares itself.

With a share s of the batches on the device's route, a resource is busy for ``host + s * (device - host)`` seconds per
batch; the busiest one bounds the throughput of every schedule. Minimising that bound over s is MorphGL's Equation 6:
for a ratio of 1 : x, with x = s / (1 - s), the three terms of the equation are the loads of PCIe, GPU and CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.core.division import PhaseTimes, Registry
from weft.core.division.operators import HOST


@dataclass(frozen=True)
class Load:
    """Seconds per batch on one resource: of a batch that the host prepares, and of one that the device prepares."""

    host: float
    device: float

    def at(self, share: float) -> float:
        """With that share of the batches on the device's route."""
        return self.host + share * (self.device - self.host)


def loads(times: PhaseTimes, registry: Registry, trainer: str, workers: int) -> dict[str, Load]:
    """The load of every resource; the host's is divided by its workers."""
    host, device = registry.host_route(), registry.device_route(trainer)
    training = registry.training(trainer)
    found: dict[str, list[float]] = {}
    for side, route in enumerate((host, device)):
        for operator in (*(route.operators if route else ()), training):
            for resource in operator.occupies:
                seconds = times.of(operator.key, workers).mean
                found.setdefault(resource, [0.0, 0.0])[side] += seconds / (workers if resource == HOST else 1)
    return {resource: Load(*sides) for resource, sides in found.items()}


def bound(by_resource: Mapping[str, Load], share: float) -> float:
    """Seconds per batch that no schedule with that share goes below."""
    return max(load.at(share) for load in by_resource.values())
