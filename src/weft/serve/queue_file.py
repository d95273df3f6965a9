"""The file of the durable queue: an SQLite database in WAL mode, its tables and indices, and its transactions."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.core.errors import InputError, WeftError

# ---- Tasks and their states

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
    """The queue cannot do this: there is no such task, or its present state does not allow it."""


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


FORMAT = 3  # of the tables below; the file holds it as its user_version
BUSY_SECONDS = 30.0
TABLES = """
CREATE TABLE IF NOT EXISTS tasks (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key TEXT UNIQUE,
    state TEXT NOT NULL,
    user TEXT NOT NULL,
    priority INTEGER NOT NULL,
    spec TEXT NOT NULL,
    after TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    max_attempts INTEGER NOT NULL,
    worker TEXT,
    lease_until REAL,
    created REAL NOT NULL,
    updated REAL NOT NULL,
    plan TEXT,
    result TEXT,
    error TEXT
);
CREATE TABLE IF NOT EXISTS dependencies (
    task TEXT NOT NULL,
    needs TEXT NOT NULL,
    PRIMARY KEY (task, needs)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    task TEXT NOT NULL,
    kind TEXT NOT NULL,
    time REAL NOT NULL,
    data TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS groups (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    device TEXT NOT NULL,
    worker TEXT NOT NULL,
    members TEXT NOT NULL,
    folder TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    seconds REAL NOT NULL,
    why TEXT NOT NULL,
    started REAL NOT NULL,
    ended REAL,
    note TEXT
);
CREATE TABLE IF NOT EXISTS shares (
    user TEXT PRIMARY KEY,
    device_seconds REAL NOT NULL,
    last_start TEXT NOT NULL
) WITHOUT ROWID;
"""
INDICES = """
CREATE INDEX IF NOT EXISTS tasks_by_state ON tasks (state, priority DESC, position);
DROP INDEX IF EXISTS tasks_by_user;
CREATE INDEX IF NOT EXISTS tasks_by_turn ON tasks (user, state, priority DESC, position);
CREATE INDEX IF NOT EXISTS tasks_by_lease ON tasks (lease_until) WHERE state = 'running';
CREATE INDEX IF NOT EXISTS tasks_by_update ON tasks (state, updated);
CREATE INDEX IF NOT EXISTS dependencies_by_need ON dependencies (needs);
CREATE INDEX IF NOT EXISTS events_by_task ON events (task, seq);
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state, started);
CREATE INDEX IF NOT EXISTS groups_by_start ON groups (started);
"""


def open_file(path: Path) -> sqlite3.Connection:
    """A connection to the queue in ``path``, which is made if it is not there, readable by its owner alone."""
    with suppress(OSError):  # it is there, or SQLite says why it cannot be made
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))  # SQLite's further files get the same mode
    try:
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        connection.row_factory = sqlite3.Row
        _use_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")  # a commit is on the disk when it returns
        _bring_up_to_date(connection, path)
    except sqlite3.Error as error:
        raise QueueError(f"{path}: cannot be used as a queue ({error}); name a file of Weft's or one to make") from None
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL; SQLite does not wait for its lock here if several processes open a new file at once."""
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.005)


def _bring_up_to_date(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a new file; add the tables, columns and indices that an older one lacks, in one transaction.

    The columns are compared even if the format is right, so that a column added to ``TABLES`` reaches every file.
    """
    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript(TABLES)
        expected = _columns(model)
    if connection.execute("PRAGMA user_version").fetchone()[0] == FORMAT and _columns(connection) == expected:
        return
    with transaction(connection):  # another process may have done it meanwhile: everything is read again
        number, former = connection.execute("PRAGMA user_version").fetchone()[0], _columns(connection)
        if number > FORMAT:
            raise QueueError(f"{path}: its format is {number} and this Weft reads up to {FORMAT}; update Weft")
        if number == 0 and former:
            raise QueueError(f"{path}: is a database of another program; name a queue of Weft or a new file")
        _run(connection, TABLES)
        for table, columns in expected.items():
            present = former.get(table, columns)
            for name in columns.keys() - present.keys():
                kind, required, default, _ = columns[name]
                if required and default is None:
                    raise QueueError(
                        f"{path}: has format {number}, whose table {table} lacks the column {name}, which cannot be "
                        "filled in; finish this queue with the Weft that made it, or name a new file"
                    )
                rule = f" NOT NULL DEFAULT {default}" if required else "" if default is None else f" DEFAULT {default}"
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}{rule}")
            if unknown := sorted(present.keys() - columns.keys()):
                raise QueueError(
                    f"{path}: has format {number}, whose table {table} has the column {unknown[0]}, which this Weft "
                    "does not read; finish this queue with the Weft that made it, or name a new file"
                )
        _run(connection, INDICES)
        connection.execute(f"PRAGMA user_version={FORMAT}")


def _run(connection: sqlite3.Connection, script: str) -> None:
    """Run the statements of ``script`` in the present transaction, which ``executescript`` would commit first."""
    for statement in script.split(";"):
        connection.execute(statement)


def _columns(connection: sqlite3.Connection) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Type, whether a value is required, default and part in the primary key, by table and column."""
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    names = [row[0] for row in connection.execute(query)]
    return {
        name: {row[1]: tuple(row)[2:] for row in connection.execute(f"PRAGMA table_info('{name}')")} for name in names
    }


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All or nothing: commits at the end, takes everything back on an error."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")
    except BaseException as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError):
            raise WeftError(f"the queue could not be written ({error}); nothing was changed") from error
        raise
