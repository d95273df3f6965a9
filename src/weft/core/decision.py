"""Progress and decisions: how far a session is, and what its driver answers. Plain data.

Everything is counted in epochs. Measured seconds are numbers in the progress, and a decision is sent to all ranks, so
that one driver decides for all who follow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.core.task import Task

RUNNING = "running"


@dataclass(frozen=True)
class Update:
    """What became of one member since the last update.

    ``rows`` are those of the epochs from ``first`` (counted from 0) on, one number per column; ``end``: the epoch it is
    to end at; ``best_epoch`` counts from 0, -1: none.
    """

    first: int
    rows: tuple[tuple[float, ...], ...]
    end: int
    best_epoch: int = -1
    best_score: float = -math.inf


@dataclass(frozen=True)
class Progress:
    """How many epochs a group has trained.

    ``seconds`` is what those since the last time took, ``prepare_seconds`` what preparing the step took before.
    """

    epochs: int
    seconds: float = 0.0
    prepare_seconds: float = 0.0


@dataclass(frozen=True)
class Stop:
    """A member that ends here: with which status (``"pruned"``, ``"cancelled"``), and its message."""

    member: str
    status: str
    message: str = ""


@dataclass(frozen=True)
class Start:
    """A trial that begins in a row of a group; ``parent``: the row whose weights, moments and buffers it takes over."""

    task: Task
    parent: int | None = None


@dataclass(frozen=True)
class Decision:
    """What a session does next. ``epoch`` is the one it was decided after; a session at another epoch refuses it.

    ``advance``: epochs to train before the next update. ``stop``: members that end here. ``drop``: ended members to
    take out of the step. ``save``: write a checkpoint now. ``pause``: train nothing until a decision without it.
    ``rates``: factors for the learning rates of members from now on. ``start``: trials that begin, by their rows.
    ``logged``: numbers that callbacks of members have logged after this epoch, by name. ``finish``: this session is
    over; ``reason`` says why if members still run (``"interrupted"``, ``"preempted"``).
    """

    epoch: int
    advance: int = 0
    stop: tuple[Stop, ...] = ()
    drop: tuple[str, ...] = ()
    save: bool = False
    pause: bool = False
    finish: bool = False
    reason: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)
    start: Mapping[int, Start] = field(default_factory=dict)
    logged: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


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
