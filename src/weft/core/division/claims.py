"""Claims: which batch the host begins next, where the device prepares every batch that the host has not begun.

The host begins one of every ``gap`` batches, so far ahead of the one to be trained that it arrives in time; the device
prepares the others inside of its steps. While the host makes a batch, all workers together, and the bus carries it, the
device trains on one batch of the host's and prepares and trains on ``gap - 1`` of its own:

    max(host / workers, copy) = given + (gap - 1) * own

That is MorphGL's Equation 6 for one resource against the other. It is solved anew whenever a phase was measured, so
that the share follows from how fast both sides turn out to be, within an epoch, and no ratio has to be right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

NEWEST = 0.15  # weight of the last measured seconds of a phase among those before
LARGEST = 64.0  # gap
SPARE = 1.0  # places before its turn at which a batch is to have arrived
EPSILON = 1e-6
PHASES = ("host", "bus", "given", "own")


@dataclass
class Claims:
    """``gap`` between batches of the host's and ``first`` of them, until phases were measured.

    ``lead``: how far ahead the host begins. Of an epoch's first batches it is less, since the device has none of the
    host's to train on, and all workers begin at once.

    Phases, in seconds per batch: ``host`` (one worker makes a batch), ``bus`` (it is carried to the device), ``given``
    (the device trains on it) and ``own`` (the device prepares a batch itself and trains on it). Also among ``seconds``,
    ``copy``, the fastest ``bus`` so far: others share the bus with reads of the device, and wait for these without
    being late.
    """

    workers: int
    gap: float
    first: float
    seconds: dict[str, float] = field(default_factory=dict)
    lead: float = field(init=False)
    _last: float = -math.inf  # place of the last batch that was begun, before rounding

    def __post_init__(self) -> None:
        self.lead = self.first
        self._solve()

    def next(self, trained: int) -> int:
        """The place that a free worker begins if ``trained`` batches are trained or in training."""
        return math.ceil(self._wanted(trained))

    def begun(self, place: int, trained: int) -> None:
        """A worker has begun the batch at ``place``: :meth:`next`, or the first after it that nobody had begun."""
        self._last = max(self._wanted(trained), place - 1.0 + EPSILON)

    def follow(self, former: Claims, batches: int) -> None:
        """Go on from ``former``, those of an epoch of ``batches`` that has just ended, and began some of this one."""
        self._last = former._last - batches

    def took(self, phase: str, seconds: float) -> None:
        """A phase of a batch took so long."""
        before = self.seconds.get(phase, seconds)
        self.seconds[phase] = before + NEWEST * (seconds - before)
        if phase == "bus":
            self.seconds["copy"] = min(self.seconds.get("copy", seconds), seconds)
        self._solve()

    def _wanted(self, trained: int) -> float:
        return max(self._last + self.gap, trained + self.lead if trained else self.first)

    def _solve(self) -> None:
        if any(self.seconds.get(phase, 0.0) <= 0.0 for phase in PHASES):
            return
        host, bus, given, own = (self.seconds[phase] for phase in PHASES)
        period = max(host / self.workers, self.seconds.get("copy", bus), given)
        self.gap = min(1.0 + (period - given) / own, LARGEST)
        self.lead = (host + bus) * self.gap / period + SPARE
        self.first = (host + bus) / own + SPARE
