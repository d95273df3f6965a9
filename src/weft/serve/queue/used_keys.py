"""Whether a submission has as many tasks as the one that was queued under its key before."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from weft.serve.queue.submission import Submission
from weft.serve.queue.task_states import QueueError


def check_whole(db: sqlite3.Connection, batch: Sequence[Submission]) -> None:
    """A :class:`QueueError` if the key of ``batch`` has other tasks in the queue than one for each of its tasks.

    Task i of a submission has the key ``USER/KEY/i``. A batch without a key, or of several, is not looked at.
    """
    if not batch or batch[0].key is None or batch[0].said_key is None:
        return
    known = _keys_like(db, batch[0].key)
    if known and known != {one.key for one in batch}:
        n, new = len(known), len(batch)
        told = f"{n} task{'s' if n > 1 else ''} in the queue, and {new} {'were' if new > 1 else 'was'} submitted"
        told = told if n != new else "other tasks in the queue"
        raise QueueError(f"key={batch[0].said_key!r} has {told}; choose another key")


def _keys_like(db: sqlite3.Connection, key: str) -> set[str]:
    """The keys of the queue that differ from ``key`` in the number at its end alone."""
    stem = key.rpartition("/")[0]
    rows = db.execute("SELECT key FROM tasks WHERE key > ? AND key < ?", (f"{stem}/", f"{stem}0"))  # 0 follows /
    return {row["key"] for row in rows if row["key"][len(stem) + 1 :].isdecimal()}
