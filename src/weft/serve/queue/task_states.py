"""The states of a task in the durable queue, which may follow which, and a task as the queue returns it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from weft.core.errors import InputError, WeftError

STATES = ("queued", "planned", "running", "paused", "done", "failed", "cancelled")
ENDED = ("done", "failed", "cancelled")
NEXT_STATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "queued": ("planned", "paused", "failed", "cancelled"),
        "planned": ("queued", "running", "paused", "failed", "cancelled"),
        "running": ("queued", "paused", "done", "failed", "cancelled"),
        "paused": ("queued", "failed", "cancelled"),
        "done": (),
        "failed": (),
        "cancelled": (),
    }
)


class QueueError(InputError):
    """What was asked of the queue is not possible: no such task, or not in its present state."""


class LostClaimError(WeftError):
    """A worker reported on a task that it no longer holds: its lease ran out, or the task was cancelled or paused."""


@dataclass(frozen=True)
class QueueTask:
    """A task in the durable queue. ``attempts`` counts its claims; the last one is the token of the present claim."""

    id: str
    position: int
    state: str
    spec: Mapping[str, Any]
    key: str | None = None
    user: str = ""
    priority: int = 0
    after: tuple[str, ...] = ()
    attempts: int = 0
    max_attempts: int = 3
    worker: str | None = None
    lease_until: float | None = None
    created: float = 0.0
    updated: float = 0.0
    plan: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "after": list(self.after)}

    @classmethod
    def from_row(cls, row: sqlite3.Row) -> QueueTask:
        """The task of a database row."""
        values = dict(row)
        for name in ("spec", "plan", "result"):
            values[name] = None if values[name] is None else json.loads(values[name])
        values["after"] = tuple(json.loads(values["after"]))
        return cls(**values)


@dataclass(frozen=True)
class QueueEvent:
    """A change of a task. ``seq`` rises by every event of the queue and is never used again."""

    seq: int
    task: str
    kind: str
    time: float
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def check_change(task: str, old: str, new: str) -> None:
    """Refuse a change of state that cannot be."""
    if new not in NEXT_STATES[old]:
        if old in ENDED:
            raise QueueError(f"task {task!r} has ended already ({old}); it cannot become {new}")
        allowed = ", ".join(NEXT_STATES[old])
        raise QueueError(f"task {task!r} is {old} and cannot become {new}; it can become {allowed}")


def storable(value: Any) -> Any:
    """``value``, if it is text, as it can be stored: what is no Unicode, as in names of files, becomes an escape."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value
