"""Candidate: one way to train a group, with the seconds and bytes that it takes."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.division import Division, PhaseTimes
from weft.core.placement import Placement
from weft.core.units import show_bytes, show_seconds
from weft.planner.division.setup import Setup
from weft.planner.division.simulator import Simulation


@dataclass(frozen=True)
class Candidate:
    """A setup, the division of its batches (None: one side prepares them), and what that takes.

    ``seconds`` of an epoch of all members; ``measured``: from measured phases.
    """

    setup: Setup
    seconds: float
    device_bytes: int
    division: Division | None = None
    host_bytes: int = 0
    simulation: Simulation | None = None
    times: PhaseTimes | None = None
    measured: bool = False

    @property
    def seconds_per_task(self) -> float:
        """Of an epoch."""
        return self.seconds / max(self.setup.members, 1)

    def words(self) -> str:
        """In one line."""
        setup, place = self.setup, self.setup.placement
        parts = ["whole graph"] if not setup.task.sampled else [f"sampled, {_places(place)}"]
        parts += [f"cache {show_bytes(place.cache_bytes)}"] if place.cache_bytes else []
        parts += [] if self.division is None else [self.division.words()]
        parts += [] if setup.captured or not setup.task.sampled else ["batches of their own sizes, steps not captured"]
        parts += [setup.task.precision] + ([f"{setup.members} tasks"] if setup.members > 1 else [])
        if setup.condition:
            parts.append(f"needs {setup.condition}")
        return "; ".join(parts)

    def figures(self) -> str:
        """Seconds and bytes in words."""
        host = f", {show_bytes(self.host_bytes)} pinned" if self.host_bytes else ""
        about = "about " if self.setup.rough else ""
        return f"{about}{show_seconds(self.seconds_per_task)} per epoch and task, {show_bytes(self.device_bytes)}{host}"


def _places(place: Placement) -> str:
    if place.features == place.topology:
        return f"features and edges: {place.features}"
    return f"features: {place.features}, edges: {place.topology}"
