"""Trials: measure whole epochs of divisions that are predicted to take about as long, then keep the fastest.

Batches are trained in their order whoever prepares them, so an epoch under another division is an epoch like others.
A division that takes longer than one side alone is predicted to take, or was measured to, is left. Reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.core.division import Division
from weft.core.units import show_seconds
from weft.planner.division.partitioner import Partition

NEAR = 0.10  # of an epoch that a division may be predicted to take longer and is tried: an error of the simulator's
KEEP = 0.03  # of an epoch that another division must save
SLOW = 1.10  # times as long as predicted from which on a first epoch is not believed: steps may be captured in it
LOST = 1.25  # times as long as the fastest from which on it is, unless steps may be captured or buffers pinned in it
MOST_TRIALS = 3  # of divisions that are not predicted to be faster
RIVALS = 2  # divisions that are compared with the present one, beside each side alone
APART = 0.1  # difference of shares from which on a division is another one
RECENT = 2  # epochs of a division of which the fastest counts


def contenders(found: Partition, present: Division, seconds: float, batches: int) -> dict[Division, float]:
    """Seconds of an epoch of ``present``, of each side alone, and of the fastest divisions of other shares or ways."""
    tried = [(one, each * batches) for one, each in found.tried]
    inside = any(one.in_step for one, _ in tried)  # beside training is simulated too fast
    known, rivals = [present], dict[Division, float]()
    for one, each in [(found.division, found.simulation.seconds), *tried]:
        if not one.divided:
            rivals[one] = each
        elif not (inside and one.beside) and len(known) <= RIVALS and all(_differ(one, other) for other in known):
            known.append(one)
            rivals[one] = each
    return {**rivals, present: seconds}


def _differ(one: Division, other: Division) -> bool:
    if one.elastic and other.elastic:  # their shares are where they begin
        return False
    return one.in_step != other.in_step or abs(one.device_share - other.device_share) >= APART


def _needs_more(division: Division, before: Sequence[Division]) -> bool:
    """Whether it has steps or buffers that none of those ``before`` had: capturing and pinning them takes long."""
    steps = set[str]().union(*map(_steps, before))
    return not _steps(division) <= steps or division.host_buffer > max(one.host_buffer for one in before)


def _steps(division: Division) -> set[str]:
    """Kinds of captured steps: on a batch that is there, and those that prepare their own."""
    own = {"own"} if division.in_step or division.kind == "sequential" else set()
    return own | ({"given"} if division.host_batches else set())


@dataclass
class Trials:
    """``predicted``: seconds of an epoch by division; ``left``: how many are tried that may well be slower."""

    predicted: Mapping[Division, float]
    left: int = MOST_TRIALS
    _took: dict[Division, list[float]] = field(default_factory=dict)
    trained: tuple[Division, ...] = ()  # all divisions that epochs were compared under, also before these trials

    def after(self, present: Division, seconds: float) -> tuple[Division, str] | None:
        """What to use next, and why, after an epoch under ``present``; None: the same."""
        believed = self._took.get(present) or self._believed(present, seconds)
        self._took.setdefault(present, []).append(seconds)
        self.trained = (*dict.fromkeys((*self.trained, present)),)
        if not believed:
            return None
        fastest = min(self._took, key=self.expected)
        new = min((one for one in self.predicted if one not in self._took), key=self.expected, default=None)
        if new is not None and (why := self._worth_trying(new, self.expected(fastest))):
            return new, why
        if self.expected(fastest) < (1.0 - KEEP) * self.expected(present):
            return fastest, f"an epoch took {self._words(fastest)} so and {self._words(present)} as now"
        return None

    def _believed(self, present: Division, seconds: float) -> bool:
        """Whether a first epoch under ``present`` says what others are going to take."""
        fastest = min(map(self.expected, self._took), default=float("inf"))
        lost = seconds > LOST * fastest and not _needs_more(present, self.trained)
        return lost or seconds <= SLOW * self.expected(present, seconds)

    def of(self, division: Division) -> dict[Division, list[float]]:
        """The epochs that were measured under ``division``, for trials with other predictions."""
        return {division: self._took[division]} if division in self._took else {}

    def expected(self, division: Division, unknown: float = float("inf")) -> float:
        """Seconds of an epoch, measured lately or predicted: of divided ones as far off as measured ones are."""
        took = self._took.get(division)
        if took:
            return min(took[-RECENT:])
        return self.predicted.get(division, unknown) * (self.off() if division.divided else 1.0)

    def off(self) -> float:
        """How many times as long as predicted the measured divisions took on average."""
        ratios = [min(took[-RECENT:]) / self.predicted[one] for one, took in self._took.items()
                  if one.divided and self.predicted.get(one)]  # fmt: skip
        return sum(ratios) / len(ratios) if ratios else 1.0

    def _worth_trying(self, new: Division, fastest: float) -> str:
        """Why, empty if it is not; uses up one of the trials unless it is predicted to be faster."""
        seconds = self.expected(new)
        if seconds < (1.0 - KEEP) * fastest:
            return f"an epoch takes {show_seconds(fastest)}, and so it is predicted to take {show_seconds(seconds)}"
        if seconds > (1.0 + NEAR) * fastest or not self.left:
            return ""
        self.left -= 1
        return f"it is predicted to take about as long ({show_seconds(seconds)}) and is tried for an epoch"

    def _words(self, division: Division) -> str:
        return show_seconds(self.expected(division))
