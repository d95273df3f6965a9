"""Fit correction factors per family of operator for a machine's roofline, from measured runs.

An observation is one run: the seconds an epoch was predicted to take, by family of operator and uncorrected, and the
seconds it took. The factors ``f`` are those for which ``sum_k f_k s_ik`` comes nearest to ``t_i`` in ratio, not in
difference (a millisecond matters to a short epoch and not to a long one), with a limit on what one odd run can do
(Huber), and held near one common factor if the runs do not separate the families.

Short runs are many and say little of long ones: runs of about the same length count together like a few, they are
forgotten before rarer ones, and an epoch far longer than any that was measured is hardly corrected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weft.core.division import PhaseTimes

FAMILIES = ("spmm", "attention", "scatter", "matmul", "pointwise", "launch")
MAX_PROFILES = 100  # kinds of sampled batches
MAX_OBSERVATIONS = 400  # the newest ones stay in a calibration file
OUTLIER = 0.2  # residual, as a log ratio, from which on a run counts less
LOOSE, TIGHT = 0.005, 0.05  # how firmly the common factor is held near 1, and each family near the common one
ROUNDS, NEAR_ENOUGH = 60, 1e-6  # of Newton's method; as a log ratio
MOST_ALIKE = 10  # runs of one decade of seconds count together like so many
REACH = 10.0  # times the longest epoch measured: what is longer is corrected less


@dataclass(frozen=True)
class Observation:
    """One run: what was predicted by family, and what it took, in seconds of an epoch."""

    families: Mapping[str, float]
    measured: float
    label: str = ""

    @property
    def usable(self) -> bool:
        """Whether both sides are positive numbers."""
        total = sum(self.families.values())
        return 0 < total < math.inf and 0 < self.measured < math.inf

    @property
    def predicted(self) -> float:
        """The seconds that were predicted, uncorrected."""
        return sum(self.families.values())

    @property
    def decade(self) -> int:
        """Equal for runs of about the same length."""
        return math.floor(math.log10(self.predicted))


@dataclass(frozen=True)
class Calibration:
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

    def with_observations(self, new: Iterable[Observation]) -> Calibration:
        """Fitted anew with more runs; of too many the oldest of the commonest length are forgotten."""
        usable = _remembered([run for run in (*self.observations, *new) if run.usable])
        return Calibration(fit(usable, self.factors), tuple(usable), self.phases)

    def for_epoch(self, seconds: float) -> Calibration:
        """The corrections of an epoch that is predicted to take ``seconds``, uncorrected.

        Runs on toy graphs are not to decide how long a large graph takes: beyond ten times the longest epoch that was
        measured, factors return to 1.
        """
        reach = REACH * max((run.predicted for run in self.observations), default=math.inf)
        if seconds <= reach:
            return self
        return replace(self, factors={name: value ** (reach / seconds) for name, value in self.factors.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        phases = {key: times.to_dict() for key, times in self.phases.items()}
        observations = [asdict(run) for run in self.observations]
        return {"factors": dict(self.factors), "observations": observations, "phases": phases}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """The inverse of :meth:`to_dict`; factors that it lacks are fitted anew."""
        phases = {key: PhaseTimes.from_dict(times) for key, times in data.get("phases", {}).items()}
        runs = [
            Observation(dict(run["families"]), float(run["measured"]), str(run.get("label", "")))
            for run in data.get("observations", ())
        ]
        usable = tuple(run for run in runs if run.usable)[-MAX_OBSERVATIONS:]
        factors = {str(name): float(value) for name, value in data.get("factors", {}).items()}
        if set(factors) != set(_present(usable)) or not all(0 < value < math.inf for value in factors.values()):
            factors = fit(usable)
        return cls(factors, usable, phases)


def _remembered(observations: list[Observation]) -> list[Observation]:
    """At most as many as a file holds; many runs of one length do not displace runs of other lengths."""
    excess = len(observations) - MAX_OBSERVATIONS
    if excess <= 0:
        return observations
    counts = Counter(run.decade for run in observations)
    forgotten: Counter[int] = Counter()
    for _ in range(excess):
        decade = max(counts, key=lambda each: counts[each] - forgotten[each])
        forgotten[decade] += 1
    remembered = []
    for run in observations:  # the oldest come first
        if forgotten[run.decade]:
            forgotten[run.decade] -= 1
        else:
            remembered.append(run)
    return remembered


def _present(observations: Sequence[Observation]) -> list[str]:
    return [name for name in FAMILIES if any(run.families.get(name, 0.0) > 0 for run in observations)]


def fit(observations: Sequence[Observation], near: Mapping[str, float] | None = None) -> dict[str, float]:
    """The factor of every family that the observations have; the search begins at the factors ``near``.

    Weighted Gauss-Newton steps on the log ratios.
    """
    import numpy as np  # plans that learn nothing do without

    present = _present(observations)
    if not present:
        return {}
    predicted = np.array([[run.families.get(name, 0.0) for name in present] for run in observations])
    measured, alike = np.array([run.measured for run in observations]), Counter(run.decade for run in observations)
    counted = np.array([min(1.0, MOST_ALIKE / alike[run.decade]) for run in observations])
    held = np.array([LOOSE] + [TIGHT] * len(present))
    start = np.log([(near or {}).get(name, 1.0) for name in present])
    logs = np.append(start.mean(), start - start.mean())  # the common factor, then each family's deviation from it
    for _ in range(ROUNDS):
        parts = predicted * np.exp(logs[0] + logs[1:])
        total = parts.sum(1)
        residuals = np.log(measured / total)
        weights = counted * np.minimum(1.0, OUTLIER / np.maximum(np.abs(residuals), 1e-12))
        rows = np.column_stack([np.ones_like(total), parts / total[:, None]])
        matrix = rows.T @ (weights[:, None] * rows) + np.diag(held)
        step = np.linalg.solve(matrix, rows.T @ (weights * residuals) - held * logs)
        logs = logs + step.clip(-1.0, 1.0)
        if np.abs(step).max() < NEAR_ENOUGH:
            break
    return dict(zip(present, np.exp(logs[0] + logs[1:]).tolist(), strict=True))
