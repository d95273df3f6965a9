"""Users in the durable queue: what each has had of the devices, and their waiting tasks in turn."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from itertools import chain, zip_longest

from weft.sched.queue_state import UserShare

# Every user once, by jumps over the index: a list of 10,000 tasks of one user is not read for it.
_USERS = """
WITH RECURSIVE found(user) AS (
    SELECT min(user) FROM tasks
    UNION ALL SELECT (SELECT min(user) FROM tasks WHERE user > found.user) FROM found WHERE found.user IS NOT NULL
) SELECT user FROM found WHERE user IS NOT NULL
"""

_IS_READY = """AND NOT EXISTS (
    SELECT 1 FROM dependencies JOIN tasks AS needed ON needed.id = dependencies.needs
    WHERE dependencies.task = tasks.id AND needed.state != 'done'
)"""


def put_shares(db: sqlite3.Connection, shares: Iterable[UserShare]) -> None:
    """Write what users have had."""
    rows = [(one.user, one.device_seconds, json.dumps(dict(one.last_start))) for one in shares]
    db.executemany("INSERT OR REPLACE INTO shares (user, device_seconds, last_start) VALUES (?, ?, ?)", rows)


def read_shares(db: sqlite3.Connection) -> list[UserShare]:
    """What every user has had."""
    return [UserShare(row["user"], row["device_seconds"], json.loads(row["last_start"])) for row in _all_shares(db)]


def _all_shares(db: sqlite3.Connection) -> list[sqlite3.Row]:
    return db.execute("SELECT * FROM shares ORDER BY user").fetchall()


def rows_in_turn(db: sqlite3.Connection, columns: str, state: str, limit: int) -> list[sqlite3.Row]:
    """The first tasks of every user in ``state``, most urgent first, one of each user in turn: at most ``limit``.

    However many one user has queued, those of the others are among them. Of more planned tasks than that, those come
    first that wait for no other: many that wait for one task do not hide it.
    """
    users = [row["user"] for row in db.execute(_USERS)]
    found = _in_turn(db, columns, state, limit, users)
    if state != "planned" or len(found) < limit:
        return found
    ready = _in_turn(db, columns, state, limit, users, _IS_READY)
    known = {row["id"] for row in ready}
    return [*ready, *(row for row in found if row["id"] not in known)][:limit]


def _in_turn(
    db: sqlite3.Connection, columns: str, state: str, limit: int, users: Iterable[str], also: str = ""
) -> list[sqlite3.Row]:
    where = f"user = ? AND state = ? {also}"
    query = f"SELECT {columns} FROM tasks WHERE {where} ORDER BY priority DESC, position LIMIT ?"
    lists = [db.execute(query, (user, state, limit)).fetchall() for user in users]
    turns = chain.from_iterable(zip_longest(*lists))
    return [row for row in turns if row is not None][:limit]
