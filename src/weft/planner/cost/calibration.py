"""Correct a machine's roofline by a factor per family of operator, fitted to measured runs (weft.engine.learning).

An observation is one run: the seconds an epoch was predicted to take, by family of operator and uncorrected, and the
seconds it took. An epoch far longer than any that was measured is hardly corrected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft.core.division import PhaseTimes
from weft.core.plain_data import PlainData

MAX_PROFILES = 100  # kinds of sampled batches
REACH = 10.0  # times the longest epoch measured: what is longer is corrected less


@dataclass(frozen=True)
class Observation(PlainData):
    """One run: what was predicted by family, and what it took, in seconds of an epoch."""

    families: Mapping[str, float]
    measured: float
    label: str = ""

    @property
    def usable(self) -> bool:
        """Whether both sides are positive numbers."""
        return 0 < self.predicted < math.inf and 0 < self.measured < math.inf

    @property
    def predicted(self) -> float:
        """The seconds that were predicted, uncorrected."""
        return sum(self.families.values())

    @property
    def decade(self) -> int:
        """Equal for runs of about the same length."""
        return math.floor(math.log10(self.predicted))


@dataclass(frozen=True)
class Calibration(PlainData):
    """The factor of every family (1 where nothing is known) and the runs they were fitted to.

    ``phases``: phase times of sampled batches by what they are of, as profiled; the newest last.
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    observations: tuple[Observation, ...] = ()
    phases: Mapping[str, PhaseTimes] = field(default_factory=dict)

    def with_phases(self, key: str, times: PhaseTimes) -> Calibration:
        """With the phase times of one more kind of batch; of too many the oldest are forgotten."""
        phases = {name: value for name, value in self.phases.items() if name != key} | {key: times}
        return replace(self, phases=dict(list(phases.items())[-MAX_PROFILES:]))

    def factor(self, name: str) -> float:
        """By how much the operators of a family take longer than predicted."""
        return self.factors.get(name, 1.0)

    def for_epoch(self, seconds: float) -> Calibration:
        """The corrections of an epoch that is predicted to take ``seconds``, uncorrected.

        Runs on toy graphs are not to decide how long a large graph takes: beyond ten times the longest epoch that was
        measured, factors return to 1.
        """
        reach = REACH * max((run.predicted for run in self.observations), default=math.inf)
        if seconds <= reach:
            return self
        return replace(self, factors={name: value ** (reach / seconds) for name, value in self.factors.items()})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """The inverse of :meth:`to_dict`, without runs that nothing can be learned from."""
        read = super().from_dict(data)
        return replace(read, observations=tuple(run for run in read.observations if run.usable))
