"""Check a schedule against MorphGL's constraints: hardware (Equation 2), dependencies (3) and buffers (4)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from weft.core.division import HOST, Registry
from weft.planner.division.simulator import Activity, Simulation

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
        if host and host[0].key in by_key and host[1].key in by_key:
            in_host.append((by_key[host[0].key].end, by_key[host[1].key].begin))
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
