"""Updates and decisions: what a session reports, and what its driver answers. Plain data, JSON in and out.

A session lives where the tensors are; its driver may be elsewhere (on rank 0, in another process) and knows what it is
told. Everything is counted in epochs and steps. Measured seconds are numbers in an update, so that one driver decides
for all who follow it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from weft.core.errors import SpecError

RUNNING = "running"
REASONS = ("", "interrupted", "preempted")  # why a session ends with members that still run


@dataclass(frozen=True)
class MemberOutline:
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
class GroupOutline:
    """What a driver needs to know about a group before the first update."""

    members: tuple[MemberOutline, ...]
    device: str = "cpu"
    compiled: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "members": [asdict(member) for member in self.members]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GroupOutline:
        """The inverse of :meth:`to_dict`."""
        known = _known(cls, data)
        members = ({**_known(MemberOutline, m), "columns": tuple(m.get("columns", ()))} for m in data["members"])
        return cls(**{**known, "members": tuple(MemberOutline(**member) for member in members)})


@dataclass(frozen=True)
class Update:
    """What became of one member since the last update.

    ``rows`` are those of the epochs from ``first`` (counted from 0) on, one number per column; ``end``: the epoch it is
    to end at; ``best_epoch`` counts from 0, -1: none. ``epochs`` and ``steps`` are those that its group has trained.
    ``seconds`` is what the group took for the epochs of this update, ``prepare_seconds`` what preparing its step took
    before. ``present``: whether the member is still part of the step. ``status``: ``"running"``, or how it ended.
    """

    member: str
    first: int
    rows: tuple[tuple[float, ...], ...]
    end: int
    best_epoch: int = -1
    best_score: float = -math.inf
    diverged: bool = False
    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0
    prepare_seconds: float = 0.0
    present: bool = True
    status: str = RUNNING

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; NaN and infinity, which JSON does not know, become strings."""
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        data["rows"] = [[_number_out(value) for value in row] for row in self.rows]
        return data | {"best_score": _number_out(self.best_score)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Update:
        """The inverse of :meth:`to_dict`, bit for bit."""
        rows = tuple(tuple(float(value) for value in row) for row in data["rows"])
        known = _known(cls, data)
        return cls(**{**known, "rows": rows, "best_score": float(known.get("best_score", "-inf"))})


@dataclass(frozen=True)
class Stop:
    """A member that ends here: with which status (``"pruned"``, ``"cancelled"``), and its message."""

    member: str
    status: str
    message: str = ""


@dataclass(frozen=True)
class Decision:
    """What a session does next. ``epoch`` is the one it was decided after; a session at another epoch refuses it.

    ``advance``: epochs to train before the next update. ``stop``: members that end here. ``drop``: ended members to
    take out of the step. ``save``: write a checkpoint now. ``pause``: train nothing until a decision without it.
    ``rates``: factors for the learning rates of members from now on. ``finish``: this session is over; ``reason`` says
    why if members still run (``"interrupted"``, ``"preempted"``).
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

    def __post_init__(self) -> None:
        if isinstance(self.advance, bool) or not isinstance(self.advance, int) or self.advance < 0:
            raise SpecError(f"decision: advance={self.advance!r} must be a number of epochs, at least 0")
        if self.reason not in REASONS:
            raise SpecError(f"decision: reason={self.reason!r} must be one of {', '.join(map(repr, REASONS))}")
        if self.advance and (self.pause or self.finish):
            raise SpecError(f"decision: advance={self.advance} must be 0 for a session that pauses or finishes")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        lists = {"stop": [asdict(stop) for stop in self.stop], "drop": list(self.drop)}
        return {**asdict(self), **lists, "rates": dict(self.rates)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Decision:
        """The inverse of :meth:`to_dict`."""
        known = _known(cls, data)
        stop = tuple(Stop(**_known(Stop, one)) for one in data.get("stop", ()))
        return cls(**{**known, "stop": stop, "drop": tuple(data.get("drop", ()))})

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """The inverse of :meth:`to_json`."""
        return cls.from_dict(json.loads(text))


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


def updates_to_json(updates: Sequence[Update]) -> str:
    """All of them as one line of JSON."""
    return json.dumps([update.to_dict() for update in updates], allow_nan=False)


def updates_from_json(text: str) -> list[Update]:
    """The inverse of :func:`updates_to_json`."""
    return [Update.from_dict(one) for one in json.loads(text)]


def _number_out(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _known(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` as arguments of ``cls``; what ``cls`` does not have is an error, since it would be ignored."""
    names = {one.name for one in fields(cls)}
    unknown = sorted(set(data) - names)
    if unknown:
        raise SpecError(f"{cls.__name__.lower()}: unknown {unknown[0]!r}; expected some of {', '.join(sorted(names))}")
    return dict(data)
