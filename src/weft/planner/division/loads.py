"""Seconds that a batch occupies each resource, by the share of batches that the trainer prepares itself.

With a share s of the batches on the device's route, a resource is busy for ``host + s * (device - host)`` seconds per
batch; the busiest one bounds the throughput of every schedule. Minimising that bound over s is MorphGL's Equation 6:
for a ratio of 1 : x, with x = s / (1 - s), the three terms of the equation are the loads of PCIe, GPU and CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.core.division import Operator, PhaseTimes, Registry
from weft.core.division.operators import BUS, HOST

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
