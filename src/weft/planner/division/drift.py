"""Compare the measured phases of divided batches with the simulated ones, and note for the journal which drifted."""

from __future__ import annotations

from collections.abc import Mapping

from weft.core.division import Division, PhaseTimes, Registry
from weft.planner.division.simulator import simulate

DRIFT = 1.25  # ratio of measured to predicted seconds from which on a phase has drifted
STRONG = 1.6  # from which on one epoch suffices; below, two in a row


class PhaseDrift:
    """The mean seconds of every phase in an epoch of ``batches`` as simulated, interference included.

    Nothing has to act on a drift: an elastic division gives each side what it gets done in time.
    """

    def __init__(self, division: Division, times: PhaseTimes, batches: int, registry: Registry) -> None:
        seconds: dict[str, list[float]] = {}
        steps: dict[int, list[float]] = {}
        for activity in simulate(division, times, batches, registry).activities:
            seconds.setdefault(activity.key, []).append(activity.end - activity.begin)
            if activity.key.endswith(f"_{division.trainer}"):
                steps.setdefault(activity.batch, []).append(activity.end - activity.begin)
        inside = [sum(parts) for parts in steps.values() if len(parts) > 1] if division.elastic else []
        if inside:  # of steps that prepare their batch only the whole is measured
            seconds[f"step_{division.trainer}"] = inside
        self.division, self.times = division, times
        self.expected = {key: sum(each) / len(each) for key, each in seconds.items()}
        self._epochs: dict[str, int] = {}  # in a row in which a phase was off

    def observe(self, measured: Mapping[str, float]) -> list[str]:
        """Sentences on the phases that have drifted since the last ones; ``measured``: mean seconds by phase."""
        notes = []
        for key, seconds in measured.items():
            ratio = seconds / self.expected[key] if self.expected.get(key) else 0.0
            if ratio <= 0.0:
                continue
            off = max(ratio, 1.0 / ratio)
            self._epochs[key] = self._epochs.get(key, 0) + 1 if off >= DRIFT else 0
            if off >= STRONG or self._epochs[key] >= 2:
                notes.append(f"{key} takes {ratio:.2g} times as long as predicted")
                self.expected[key], self._epochs[key] = seconds, 0
        return notes
