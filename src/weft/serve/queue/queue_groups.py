"""Groups in the durable queue: which tasks were started together, where, and how that ended."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, dataclass
from typing import Any

from weft.serve.queue.task_states import storable


@dataclass(frozen=True)
class Group:
    """Tasks that one worker trains together.

    ``state``: ``running``; ``preempted`` (stopped with a checkpoint, to go on as it is); ``ended``; ``dissolved``
    (its worker was lost, its members go on alone). ``folder`` is relative to the folder of all runs. ``bytes`` and
    ``seconds`` are predicted, the safety margin included.
    """

    id: str
    device: str
    worker: str
    members: tuple[str, ...]
    folder: str
    bytes: int
    seconds: float
    why: str
    started: float
    state: str = "running"
    ended: float | None = None
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "members": list(self.members)}


def put_group(db: sqlite3.Connection, group: Group) -> None:
    """Write a group that starts, or starts again."""
    values = {**group.to_dict(), "members": json.dumps(list(group.members))}
    names = ", ".join(values)
    marks = ", ".join("?" for _ in values)
    db.execute(f"INSERT OR REPLACE INTO groups ({names}) VALUES ({marks})", tuple(values.values()))


def change_group(db: sqlite3.Connection, group: str, state: str, now: float, note: str) -> None:
    """Note how a group ended."""
    db.execute("UPDATE groups SET state = ?, ended = ?, note = ? WHERE id = ?", (state, now, storable(note), group))


def read_groups(db: sqlite3.Connection, state: str | None, limit: int) -> list[Group]:
    """Groups, newest first."""
    where, values = ("WHERE state = ?", (state,)) if state else ("", ())
    rows = db.execute(f"SELECT * FROM groups {where} ORDER BY started DESC LIMIT ?", (*values, limit))
    return [Group(**{**dict(row), "members": tuple(json.loads(row["members"]))}) for row in rows]
