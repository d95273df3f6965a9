"""Progress and decisions: how far a session is, and what its driver answers. Plain data.

Everything is counted in epochs. Measured seconds are numbers in the progress, and a decision is sent to all ranks, so
that one driver decides for all who follow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.core.errors import SpecError
from weft.core.plain_data import PlainData

RUNNING = "running"
REASONS = ("", "interrupted", "preempted")  # why a session ends with members that still run


@dataclass(frozen=True)
class MemberOutline(PlainData):
    """What a driver needs to know about a member: its name, its epochs, and whose scores compare with its own.

    ``score``: the column of the validation metric in a row, -1: none; ``lower``: less of it is better. ``peers`` is
    equal for members that compare. ``columns``: the names of a row's numbers.
    """

    name: str
    epochs: int
    score: int = -1
    peers: str = ""
    columns: tuple[str, ...] = ()
    lower: bool = False


@dataclass(frozen=True)
class Update:
    """What became of one member since the last update.

    ``rows`` are those of the epochs from ``first`` (counted from 0) on, one number per column; ``end``: the epoch it is
    to end at; ``best_epoch`` counts from 0, -1: none.
    """

    member: str
    first: int
    rows: tuple[tuple[float, ...], ...]
    end: int
    best_epoch: int = -1
    best_score: float = -math.inf
    diverged: bool = False


@dataclass(frozen=True)
class Progress:
    """How many epochs a group has trained.

    ``seconds`` is what those since the last time took, ``prepare_seconds`` what preparing the step took before.
    ``phases``: mean seconds per batch of the phases that preparing batches has, by name (empty: not divided).
    """

    epochs: int
    seconds: float = 0.0
    prepare_seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop(PlainData):
    """A member that ends here: with which status (``"pruned"``, ``"cancelled"``), and its message."""

    member: str
    status: str
    message: str = ""


@dataclass(frozen=True)
class Decision(PlainData):
    """What a session does next. ``epoch`` is the one it was decided after; a session at another epoch refuses it.

    ``advance``: epochs to train before the next update. ``stop``: members that end here. ``drop``: ended members to
    take out of the step. ``save``: write a checkpoint now. ``pause``: train nothing until a decision without it.
    ``notes``: sentences for the journal. ``rates``: factors for the learning rates of members from now on. ``finish``:
    this session is over; ``reason`` says why if members still run (``"interrupted"``, ``"preempted"``).
    """

    epoch: int
    advance: int = 0
    stop: tuple[Stop, ...] = ()
    drop: tuple[str, ...] = ()
    save: bool = False
    pause: bool = False
    finish: bool = False
    reason: str = ""
    notes: tuple[str, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.advance, bool) or not isinstance(self.advance, int) or self.advance < 0:
            raise SpecError(f"decision: advance={self.advance!r} must be a number of epochs, at least 0")
        if self.reason not in REASONS:
            raise SpecError(f"decision: reason={self.reason!r} must be one of {', '.join(map(repr, REASONS))}")
        if self.advance and (self.pause or self.finish):
            raise SpecError(f"decision: advance={self.advance} must be 0 for a session that pauses or finishes")


@dataclass(frozen=True)
class Requests:
    """Requests from outside at the time of a decision. ``cancel``: names; ``cancel_all``: every member."""

    cancel: frozenset[str] = frozenset()
    cancel_all: bool = False
    pause: bool = False
    preempt: bool = False
    interrupt: bool = False

    def cancelled(self, name: str) -> bool:
        """Whether ``name`` is to be cancelled."""
        return self.cancel_all or name in self.cancel
