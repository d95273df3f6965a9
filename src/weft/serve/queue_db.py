"""A durable queue of tasks in one SQLite file that several processes share.

Every change of a task is one transaction, which also writes one event. Killing any process at any moment loses nothing
that was acknowledged: the file holds either the state before or the state after.

A worker claims planned tasks for a lease and sends heartbeats. If it dies, the lease runs out and the task is queued
again, up to ``max_attempts`` claims. Reports carry the attempt, so that a worker that was taken for dead cannot
complete a task that another one has.

A :class:`QueueDB` belongs to the thread that opened it; open one per thread or process.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.core.errors import InputError, WeftError
from weft.core.plain_data import PlainData
from weft.sched.queue_state import UserShare

# ---- Tasks and their states

STATES = ("queued", "planned", "running", "paused", "done", "failed", "cancelled")
OPEN, ENDED = STATES[:4], STATES[4:]
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


class LostQueueError(WeftError):
    """Another server owns the queue now: this one can write nothing more, and has to end."""


@dataclass(frozen=True)
class QueueTask(PlainData):
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
    sweep: str | None = None

    @classmethod
    def from_row(cls, row: sqlite3.Row) -> QueueTask:
        """The task of a database row."""
        values = dict(row)
        for name in ("spec", "plan", "result"):
            values[name] = None if values[name] is None else json.loads(values[name])
        values["after"] = tuple(json.loads(values["after"]))
        return cls(**values)


@dataclass(frozen=True)
class QueueEvent(PlainData):
    """A change of a task. ``seq`` rises by every event of the queue and is never used again."""

    seq: int
    task: str
    kind: str
    time: float
    data: Mapping[str, Any] = field(default_factory=dict)


def storable(value: Any) -> Any:
    """``value``, if it is text, as it can be stored: what is no Unicode, as in names of files, becomes an escape."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


# ---- The file: an SQLite database in WAL mode, its tables and indices, and its transactions

MOST_PAGE_BYTES = 1 << 20  # after which a page of a listing ends: made in 20 ms
FORMAT = 4  # of the tables below; the file holds it as its user_version
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
    error TEXT,
    sweep TEXT
);
CREATE TABLE IF NOT EXISTS sweeps (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    user TEXT NOT NULL,
    spec TEXT NOT NULL,
    created REAL NOT NULL
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
CREATE TABLE IF NOT EXISTS server (
    id INTEGER PRIMARY KEY,
    nonce TEXT NOT NULL DEFAULT '',
    clock REAL
);
"""
INDICES = """
CREATE INDEX IF NOT EXISTS tasks_by_state ON tasks (state, priority DESC, position);
DROP INDEX IF EXISTS tasks_by_user;
CREATE INDEX IF NOT EXISTS tasks_by_turn ON tasks (user, state, priority DESC, position);
CREATE INDEX IF NOT EXISTS tasks_by_lease ON tasks (lease_until) WHERE state = 'running';
CREATE INDEX IF NOT EXISTS tasks_by_sweep ON tasks (sweep, position, state) WHERE sweep IS NOT NULL;
CREATE INDEX IF NOT EXISTS tasks_by_update ON tasks (state, updated);
CREATE INDEX IF NOT EXISTS dependencies_by_need ON dependencies (needs);
CREATE INDEX IF NOT EXISTS events_by_task ON events (task, seq);
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state, started);
CREATE INDEX IF NOT EXISTS groups_by_start ON groups (started);
"""


@dataclass(frozen=True)
class Owner:
    """The server that a queue belongs to: the ``nonce`` that it wrote there, and the device and inode of the file."""

    nonce: str
    file: os.stat_result

    def check_file(self, path: Path) -> None:
        """A :class:`WeftError` if ``path`` no longer leads to the file of the queue."""
        with suppress(OSError):
            if os.path.samestat(os.stat(path), self.file):
                return
        trouble = "the file of the queue was deleted or replaced while the server runs, and nothing can be written"
        remedy = "put it back, or stop the server and restore a copy that `weft serve backup` made"
        raise WeftError(f"{path.name}: {trouble}; {remedy}")


def take_queue(path: Path) -> Owner:
    """Make a new owner of the queue in ``path``; a former one can write nothing from now on.

    A :class:`QueueError` if pages of the file are damaged.
    """
    with closing(open_file(path)) as connection:
        _check_pages(connection, path)
        owner = Owner(uuid.uuid4().hex, os.stat(path))
        with transaction(connection) as db:
            db.execute("INSERT OR IGNORE INTO server (id) VALUES (0)")
            last = "(SELECT time FROM events ORDER BY seq DESC LIMIT 1)"
            db.execute(f"UPDATE server SET nonce = ?, clock = coalesce(clock, {last})", (owner.nonce,))
    return owner


def _check_pages(connection: sqlite3.Connection, path: Path) -> None:
    try:
        found = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        remedy = f"restore a copy that `weft serve backup {path} COPY` made, or name a new file"
        raise QueueError(f"{path}: is damaged ({' '.join(found.split())[:120]}); {remedy}")


def back_up(path: Path, copy: Path) -> int:
    """Write the queue in ``path`` as it is now to the new file ``copy``, also while a server runs; how many tasks.

    The copy has its name only once it is complete and SQLite has checked it.
    """
    if not path.is_file():
        raise QueueError(f"{path}: there is no such file; name the queue, as `weft serve --db` does")
    if os.path.lexists(copy):
        raise QueueError(f"{copy}: is there already and is not overwritten; name a new file")
    part = copy.with_name(f"{copy.name}.part")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        remedy = "remove it, if no other backup writes it" if part.exists() else "name a file in a folder to write to"
        raise QueueError(f"{part}: cannot be made ({error.strerror}); {remedy}") from None
    try:
        with closing(open_file(path)) as source, closing(sqlite3.connect(part)) as target:
            source.backup(target)
            _check_pages(target, path)
            count = int(target.execute("SELECT count(*) FROM tasks").fetchone()[0])
        part.rename(copy)
    except (sqlite3.Error, OSError) as error:
        raise WeftError(f"{copy}: could not be written ({error}); there is no copy") from None
    finally:
        part.unlink(missing_ok=True)
    return count


def open_file(path: Path) -> sqlite3.Connection:
    """A connection to the queue in ``path``, which is made if it is not there, readable by its owner alone."""
    with suppress(OSError):  # it is there, or SQLite says why it cannot be made
        if os.stat(path).st_nlink > 1:  # SQLite finds what was written last by the name of the file
            raise QueueError(f"{path}: has several names (hard links) and may have one; remove the others, or copy it")
    with suppress(OSError):
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


# ---- Groups


@dataclass(frozen=True)
class Group(PlainData):
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


# ---- Users: their shares of the devices, and their waiting tasks in turn

# Every user once, by jumps over the index: a list of 10,000 tasks of one user is not read for it.
_USERS = """
WITH RECURSIVE found(user) AS (
    SELECT min(user) FROM tasks
    UNION ALL SELECT (SELECT min(user) FROM tasks WHERE user > found.user) FROM found WHERE found.user IS NOT NULL
)
"""

_IS_READY = """AND NOT EXISTS (
    SELECT 1 FROM dependencies CROSS JOIN tasks AS needed ON needed.id = dependencies.needs
    WHERE dependencies.task = tasks.id AND needed.state != 'done'
)"""


def put_shares(db: sqlite3.Connection, shares: Iterable[UserShare]) -> None:
    """Write what users have had."""
    rows = [(share.user, share.device_seconds, json.dumps(dict(share.last_start))) for share in shares]
    db.executemany("INSERT OR REPLACE INTO shares (user, device_seconds, last_start) VALUES (?, ?, ?)", rows)


def rows_in_turn(db: sqlite3.Connection, columns: str, state: str, limit: int) -> list[sqlite3.Row]:
    """The first tasks of every user in ``state``, most urgent first, one of each user in turn: at most ``limit``.

    However many one user has queued, those of the others are among them. Of more planned tasks than that, those come
    first that wait for no other: many that wait for one task do not hide it.
    """

    def in_turn(condition: str = "") -> list[sqlite3.Row]:
        first = f"user = found.user AND state = ? {condition} ORDER BY priority DESC, position LIMIT ?"
        query = f"""{_USERS} SELECT {columns} FROM (
            SELECT position AS place,
                row_number() OVER (PARTITION BY tasks.user ORDER BY priority DESC, position) AS turn
            FROM found CROSS JOIN tasks ON position IN (SELECT position FROM tasks WHERE {first})
        ) CROSS JOIN tasks ON position = place ORDER BY turn, user LIMIT ?"""
        return db.execute(query, (state, limit, limit)).fetchall()

    rows = in_turn()
    if state != "planned" or len(rows) < limit:
        return rows
    ready = in_turn(_IS_READY)
    ready_ids = {row["id"] for row in ready}
    return [*ready, *(row for row in rows if row["id"] not in ready_ids)][:limit]


# ---- Submissions


@dataclass(frozen=True)
class Submission:
    """A task to queue. The same ``key`` queues it only once; without an ``id`` it gets one.

    ``said_key``: the key as the user gave it, for messages. ``by``: who submits it, for the record. ``sweep``: what the
    sweep is that all tasks of its batch are of, as :meth:`weft.Sweep.to_dict` describes it; None for a task by itself.
    """

    spec: Mapping[str, Any]
    id: str | None = None
    key: str | None = None
    user: str = ""
    priority: int = 0
    after: tuple[str, ...] = ()
    max_attempts: int = 3
    said_key: str | None = None
    by: str = ""
    sweep: Mapping[str, Any] | None = None

    @cached_property
    def text(self) -> str:
        """The spec as it is stored."""
        return _json(self.spec)


class QueueDB:
    """The durable queue in ``path``; ``connection``: for retention and checks."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time, owner: Owner | None = None) -> None:
        self.path, self._clock, self._owner = Path(path), clock, owner
        if owner is not None:  # else opening would make another file
            owner.check_file(self.path)
        self.connection = open_file(self.path)

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def __enter__(self) -> QueueDB:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction; nothing is written once the queue is no longer the owner's."""
        with transaction(self.connection) as db:
            if self._owner is not None:
                self._owner.check_file(self.path)
                if db.execute("SELECT nonce FROM server").fetchone()[0] != self._owner.nonce:
                    raise LostQueueError(f"{self.path.name}: another server has taken this queue over; use that one")
            yield db

    # Submitting

    def submit_apart(self, batches: Sequence[Sequence[Submission]]) -> list[list[QueueTask] | QueueError]:
        """Queue several batches in one transaction, each as a whole or not at all; its tasks or error per batch."""
        answers: list[list[QueueTask] | QueueError] = []
        with self.writing() as db:
            for batch in batches:
                db.execute("SAVEPOINT batch")
                try:
                    answers.append(self._submit_all(batch))
                except QueueError as error:
                    db.execute("ROLLBACK TO batch")
                    answers.append(error)
                db.execute("RELEASE batch")
        return answers

    def _submit_all(self, batch: Sequence[Submission]) -> list[QueueTask]:
        """Queue a batch; refuse a key that has other tasks in the queue than one for each task of the batch.

        Task i of a submission has the key ``USER/KEY/i``.
        """
        if batch and batch[0].key is not None and batch[0].said_key is not None:
            stem = batch[0].key.rpartition("/")[0]
            query = "SELECT key FROM tasks WHERE key > ? AND key < ?"
            rows = self.connection.execute(query, (f"{stem}/", f"{stem}0"))  # 0 follows /
            keys = {row["key"] for row in rows if row["key"][len(stem) + 1 :].isdecimal()}
            if keys and keys != {submission.key for submission in batch}:
                former, new = len(keys), len(batch)
                difference = "other tasks in the queue"
                if former != new:
                    difference = f"{former} task{'s' if former > 1 else ''} in the queue, and {new} "
                    difference += f"{'were' if new > 1 else 'was'} submitted"
                raise QueueError(f"key={batch[0].said_key!r} has {difference}; choose another key")
        keys = json.dumps([new.key for new in batch if new.key])
        rows = self.connection.execute("SELECT * FROM tasks WHERE key IN (SELECT value FROM json_each(?))", (keys,))
        known = {row["key"]: QueueTask.from_row(row) for row in rows.fetchall()}
        former = [self._same(new, known[new.key]) if new.key in known else None for new in batch]
        fresh = [new for new, task in zip(batch, former, strict=True) if task is None]
        made = iter(self._insert(fresh) if fresh else ())
        return [task or next(made) for task in former]

    def _check_needs(self, batch: Sequence[Submission]) -> None:
        """Refuse to wait for tasks that will never be done."""
        states = self.states(needed for new in batch for needed in new.after)
        for new in batch:
            for needed in new.after:
                if (state := states.get(needed, "not in the queue")) in ("failed", "cancelled", "not in the queue"):
                    infer = new.spec.get("infer")
                    what = "infer.of" if isinstance(infer, Mapping) and infer.get("of") == needed else "after"
                    who = f"task {new.id!r}: " if new.id is not None else ""
                    raise QueueError(f"{who}{what}={needed!r} is {state}; it will never be done")
            states[str(new.id)] = "queued"  # the next ones of the batch may wait for it

    def _insert(self, batch: Sequence[Submission]) -> list[QueueTask]:
        """Write new tasks by one statement per table: 10,000 take 50 ms, and by 40,000 statements 320.

        Others wait for that, and for every thread that has the interpreter between two statements.
        """
        self._check_needs(batch)
        now, names = self._clock(), [new.id or os.urandom(6).hex() for new in batch]
        sweep = None if batch[0].sweep is None else self._insert_sweep(batch[0].sweep, batch[0].user, now)
        rows = json.dumps(
            [
                (name, new.key, new.user, new.priority, new.text, new.max_attempts, new.after, new.by)
                for name, new in zip(names, batch, strict=True)
            ]
        )
        columns, new_row = "id, key, user, priority, spec, max_attempts, after", "json_extract(value, '$[{}]')".format
        taken = ", ".join(map(new_row, range(7)))
        query = f"INSERT INTO tasks ({columns}, state, created, updated, sweep) SELECT {taken}, 'queued', ?, ?, ?"
        try:
            self.connection.execute(f"{query} FROM json_each(?)", (now, now, sweep, rows))
        except sqlite3.IntegrityError:
            raise QueueError("a task is in the queue already; choose another id, or submit with a key") from None
        first = self.connection.execute("SELECT last_insert_rowid()").fetchone()[0] - len(batch) + 1
        self.connection.execute(
            f"INSERT OR IGNORE INTO dependencies (task, needs) SELECT {new_row(0).replace('value', 'new.value')}, "
            "needs.value FROM json_each(?) AS new, json_each(new.value, '$[6]') AS needs",
            (rows,),
        )
        by = f"iif({new_row(7)} = '', '{{}}', json_object('by', {new_row(7)}))"
        query = f"INSERT INTO events (task, kind, time, data) SELECT {new_row(0)}, 'queued', ?, {by} FROM json_each(?)"
        self.connection.execute(query, (now, rows))
        return [
            QueueTask(name, first + place, "queued", new.spec, new.key, new.user, new.priority, new.after,
                      max_attempts=new.max_attempts, created=now, updated=now, sweep=sweep)
            for place, (name, new) in enumerate(zip(names, batch, strict=True))
        ]  # fmt: skip

    def _insert_sweep(self, spec: Mapping[str, Any], user: str, now: float) -> str:
        """Write a new sweep; its name: the user's, or ``sweep``, with the next number, which no id of a task has."""
        stem = re.sub(r"[^\w=.+-]+", "_", str(spec.get("name") or ""), flags=re.ASCII).strip("_.-")[:80] or "sweep"
        numbers = "SELECT substr(name, ?) AS text FROM sweeps WHERE name > ? AND name < ?"  # . follows -
        last = f"SELECT max(CAST(text AS INTEGER)) FROM ({numbers}) WHERE text NOT GLOB '*[^0-9]*'"  # not of stem-1-1
        row = self.connection.execute(last, (len(stem) + 2, f"{stem}-", f"{stem}.")).fetchone()
        name = f"{stem}-{(row[0] or 0) + 1}"
        query = "INSERT INTO sweeps (name, user, spec, created) VALUES (?, ?, ?, ?)"
        self.connection.execute(query, (name, user, _json(spec, sort_keys=False), now))
        return name

    def _same(self, new: Submission, former: QueueTask) -> QueueTask:
        """``former``, the task that was queued under the key of ``new``; a :class:`QueueError` if it is another one."""
        spec, other = json.loads(new.text), ""
        if former.spec != spec:
            names = [name for name in dict.fromkeys((*former.spec, *spec)) if former.spec.get(name) != spec.get(name)]
            limits = ("budget", "deadline", "time_limit", "max_attempts")
            other = f"another {names[0]}" if len(names) == 1 and names[0] in limits else "another spec"
        elif former.priority != new.priority:
            other = f"another priority ({former.priority}, not {new.priority})"
        elif set(former.after) != set(new.after):
            other = f"another after ({', '.join(former.after) or 'nothing'}, not {', '.join(new.after) or 'nothing'})"
        if other:
            key = new.key if new.said_key is None else new.said_key
            raise QueueError(f"key={key!r} was used for task {former.id!r} with {other}; choose another key")
        return former

    # Changing

    def plan_many(self, plans: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Attach plans to several queued tasks in one transaction; those that are no longer queued are left alone."""
        rows = json.dumps([(task, _json(plan)) for task, plan in plans])
        with self.writing() as db:
            now, new = self._clock(), "json_extract(new.value, '$[{}]')".format  # + keeps SQLite from all queued tasks
            changed = db.execute(
                f"UPDATE tasks SET state = 'planned', updated = ?, plan = {new(1)} FROM json_each(?) AS new "
                f"WHERE tasks.id = {new(0)} AND +state = 'queued' RETURNING id",
                (now, rows),
            )
            self._emit([row["id"] for row in changed.fetchall()], "planned", now, {})

    def unplan(self, task: str) -> QueueTask:
        """Queue a planned task again without its plan: what it was made from has changed."""
        with self.writing():
            return self._change(self.get(task), "queued", plan=None)

    def claim_all(
        self, tasks: Iterable[str], worker: str, lease_seconds: float, group: Group, shares: Iterable[UserShare] = ()
    ) -> list[QueueTask]:
        """Planned tasks by name, all or none, now running on ``worker`` as ``group``, which is written down as well.

        ``shares``: of their users, from now on.
        """
        with self.writing() as db:
            values = {**asdict(group), "members": json.dumps(group.members)}
            names = ", ".join(values)
            marks = ", ".join("?" for _ in values)
            db.execute(f"INSERT OR REPLACE INTO groups ({names}) VALUES ({marks})", tuple(values.values()))
            put_shares(db, shares)
            claim = {"worker": worker, "lease_until": self._clock() + lease_seconds}
            planned = [self.get(task) for task in tasks]
            return [self._change(task, "running", attempts=task.attempts + 1, **claim) for task in planned]

    def heartbeat(self, worker: str, lease_seconds: float) -> list[str]:
        """Renew the leases of ``worker``; returns the tasks that it still holds, so it can stop the others."""
        with self.writing() as db:
            lease = self._clock() + lease_seconds
            where = "worker = ? AND state = 'running'"
            db.execute(f"UPDATE tasks SET lease_until = ? WHERE {where}", (lease, worker))
            return [row["id"] for row in db.execute(f"SELECT id FROM tasks WHERE {where} ORDER BY position", (worker,))]

    def finish(self, task: str, worker: str, attempt: int, result: Mapping[str, Any]) -> QueueTask:
        """Report a task as done, with its result."""
        with self.writing():
            held = self._held(task, worker, attempt)
            return self._change(held, "done", result=result, error=None)

    def fail(
        self, task: str, worker: str, attempt: int, error: str, retry: bool = False, **known: Mapping[str, Any]
    ) -> QueueTask:
        """Report that an attempt failed: the task is queued again if ``retry`` and it has attempts left.

        ``known``: its ``plan`` if more is known of it now, and the ``result`` that it left all the same.
        """
        with self.writing():
            return self._lost(self._held(task, worker, attempt), error, retry, **known)

    def release(self, task: str, reason: str, **known: Mapping[str, Any]) -> QueueTask:
        """Queue a running task again through no fault of its own: it keeps the attempts that it has left.

        ``known``: its ``plan`` if more is known of it now.
        """
        with self.writing():
            running = self.get(task)
            return self._change(running, "queued", error=reason, max_attempts=running.max_attempts + 1, **known)

    def hold(self, task: str, reason: str, plan: Mapping[str, Any]) -> QueueTask:
        """Pause a running task that must not run again by itself; ``reason`` says why, and how to try it again."""
        with self.writing():
            running = self.get(task)
            attempts = running.max_attempts + 1  # a task that is resumed has an attempt
            return self._change(running, "paused", error=reason, plan=plan, max_attempts=attempts)

    def refuse(self, task: str, error: str) -> QueueTask:
        """Fail a task that waits and can never run."""
        with self.writing():
            return self._change(self.get(task), "failed", error=error)

    def replan(self, task: str, plan: Mapping[str, Any]) -> None:
        """Replace the plan of a task without changing its state: what is known of it was corrected."""
        with self.writing():
            values = (_json(plan), self._clock(), self.get(task).id)
            self.connection.execute("UPDATE tasks SET plan = ?, updated = ? WHERE id = ?", values)

    def record(self, events: Iterable[tuple[str, str, Mapping[str, Any]]]) -> None:
        """Write events that change no state, each as task, kind and data: progress, notes, checkpoints."""
        with self.writing():
            for task, kind, data in events:
                self._emit([task], kind, self._clock(), data)

    def end_group(self, group: str, state: str, note: str = "", shares: Iterable[UserShare] = ()) -> None:
        """Note that a group no longer runs: ``ended``, ``dissolved`` or ``preempted`` (it may go on).

        ``shares``: of the users of its members, from now on.
        """
        with self.writing() as db:
            values = (state, self._clock(), storable(note), group)
            db.execute("UPDATE groups SET state = ?, ended = ?, note = ? WHERE id = ?", values)
            put_shares(db, shares)

    def shares(self) -> list[UserShare]:
        """What every user has had of the devices."""
        return [
            UserShare(row["user"], row["device_seconds"], json.loads(row["last_start"]))
            for row in self.connection.execute("SELECT * FROM shares ORDER BY user").fetchall()
        ]

    def groups(self, state: str | None = None, limit: int = 200) -> list[Group]:
        """The groups that started last, newest first."""
        where, values = ("WHERE state = ?", (state,)) if state else ("", ())
        rows = self.connection.execute(f"SELECT * FROM groups {where} ORDER BY started DESC LIMIT ?", (*values, limit))
        return [Group(**{**dict(row), "members": tuple(json.loads(row["members"]))}) for row in rows]

    def requeue_expired(self) -> list[QueueTask]:
        """Take running tasks from workers whose lease has run out; returns them in their new state."""
        with self.writing() as db:
            rows = db.execute(
                "SELECT * FROM tasks WHERE state = 'running' AND lease_until < ? ORDER BY position", (self._clock(),)
            ).fetchall()
            tasks = [QueueTask.from_row(row) for row in rows]
            return [self._lost(task, f"worker {task.worker!r} sent no heartbeat", retry=True) for task in tasks]

    def cancel(self, task: str, by: str = "") -> QueueTask:
        """Cancel a task and fail what depends on it; a task that has ended stays as it is. ``by``: for the record."""
        with self.writing():
            present = self.get(task)
            return present if present.state in ENDED else self._change(present, "cancelled", by)

    def pause(self, task: str, by: str = "") -> QueueTask:
        """Keep a task from running until it is resumed; a running one is taken from its worker."""
        with self.writing():
            present = self.get(task)
            attempts = present.max_attempts + (present.state == "running")  # a pause is not a failed attempt
            return self._change(present, "paused", by, max_attempts=attempts)

    def resume(self, task: str, by: str = "") -> QueueTask:
        """Queue a paused task again."""
        with self.writing():
            paused = self.get(task)
            if paused.state != "paused":
                raise QueueError(f"task {task!r} is {paused.state}, not paused; only a paused task can be resumed")
            return self._change(paused, "queued", by)

    def change_sweep(self, sweep: str, action: str, by: str) -> list[str]:
        """Cancel, pause or resume the tasks of a sweep that can be, in one transaction; their ids.

        By as many statements for 10,000 tasks as for one, but for those that others depend on.
        """
        state, former = SWEEP_CHANGES[action]
        with self.writing() as db:
            now, marks = self._clock(), ", ".join("?" for _ in former)
            rows = db.execute(
                "UPDATE tasks SET state = ?, updated = ?, worker = NULL, lease_until = NULL, "
                "max_attempts = max_attempts + (? = 'paused' AND state = 'running') "  # a pause is no failed attempt
                f"WHERE sweep = ? AND state IN ({marks}) RETURNING id",
                (state, now, state, sweep, *former),
            )
            changed = [row["id"] for row in rows.fetchall()]
            self._emit(changed, state, now, {"by": by} if by else {})
            if state == "cancelled":
                query = "SELECT DISTINCT needs FROM dependencies WHERE needs IN (SELECT value FROM json_each(?))"
                needed = db.execute(query, (json.dumps(changed),)).fetchall()
                self._fail_dependent([row["needs"] for row in needed], state, now)
        return changed

    def _held(self, task: str, worker: str, attempt: int) -> QueueTask:
        held = self.get(task)
        if (held.state, held.worker, held.attempts) != ("running", worker, attempt):
            raise LostClaimError(
                f"task {task!r} is {held.state} (attempt {held.attempts}), no longer attempt {attempt} on {worker!r}; "
                "stop working on it"
            )
        return held

    def _lost(self, task: QueueTask, error: str, retry: bool, **known: Any) -> QueueTask:
        """End an attempt; ``known``: what is written of the task besides its state."""
        again = retry and task.attempts < task.max_attempts
        error = f"{error} (attempt {task.attempts} of {task.max_attempts})" if retry and not again else error
        return self._change(task, "queued" if again else "failed", error=error, **known)

    def _change(self, task: QueueTask, state: str, by: str = "", **columns: Any) -> QueueTask:
        """Move ``task`` to ``state`` and write the event; what depends on a task that failed fails as well.

        Only a running task has a worker.
        """
        columns = {"worker": None, "lease_until": None, **columns}
        if task.state in ENDED:
            raise QueueError(f"task {task.id!r} has ended already ({task.state}); it cannot become {state}")
        if state not in NEXT_STATES[task.state]:
            allowed = ", ".join(NEXT_STATES[task.state])
            raise QueueError(f"task {task.id!r} is {task.state} and cannot become {state}; it can become {allowed}")
        now, names = self._clock(), "".join(f", {name} = ?" for name in columns)
        self.connection.execute(
            f"UPDATE tasks SET state = ?, updated = ?{names} WHERE id = ?",
            (state, now, *(_json(v) if isinstance(v, Mapping) else storable(v) for v in columns.values()), task.id),
        )
        data = {name: columns[name] for name in ("worker", "attempts", "error") if columns.get(name) is not None}
        self._emit([task.id], state, now, {**data, "by": by} if by else data)
        if state in ("failed", "cancelled"):
            self._fail_dependent([task.id], state, now)
        return self.get(task.id)

    def _fail_dependent(self, tasks: Iterable[str], state: str, now: float) -> None:
        """Fail what depends on ``tasks``, which have become ``state``."""
        lost = deque((task, state) for task in tasks)
        fail = "UPDATE tasks SET state = 'failed', updated = ?, error = ? WHERE state NOT IN (?, ?, ?) AND id IN "
        fail += "(SELECT task FROM dependencies WHERE needs = ?) RETURNING id"
        needed_too = "SELECT DISTINCT needs FROM dependencies WHERE needs IN (SELECT value FROM json_each(?))"
        while lost:  # by three statements per task that others wait for, however many do
            needed, how = lost.popleft()
            error = f"depends on {needed!r}, which was {how}"
            failed = [row["id"] for row in self.connection.execute(fail, (now, error, *ENDED, needed)).fetchall()]
            self._emit(failed, "failed", now, {"error": error})
            rows = self.connection.execute(needed_too, (json.dumps(failed),)).fetchall()
            lost.extend((row["needs"], "failed") for row in rows)

    def _emit(self, tasks: Sequence[str], kind: str, now: float, data: Mapping[str, Any]) -> None:
        """Write the same event of some tasks."""
        rows = (kind, now, _json(data), json.dumps(tasks))
        query = "INSERT INTO events (task, kind, time, data) SELECT value, ?, ?, ? FROM json_each(?)"
        self.connection.execute(query, rows)

    # Reading

    def get(self, task: str) -> QueueTask:
        """One task; an error if there is none of that id."""
        row = self.connection.execute("SELECT * FROM tasks WHERE id = ?", (task,)).fetchone()
        if row is None:
            raise QueueError(f"there is no task {task!r} in {self.path.name}; check the id")
        return QueueTask.from_row(row)

    def states(self, tasks: Iterable[str]) -> dict[str, str]:
        """The states of the tasks of those ids that are in the queue."""
        query = "SELECT json_group_object(id, state) FROM tasks WHERE id IN (SELECT value FROM json_each(?))"
        found: dict[str, str] = json.loads(self.connection.execute(query, (json.dumps([*set(tasks)]),)).fetchone()[0])
        return found

    def known(self, tasks: Iterable[str]) -> list[QueueTask]:
        """The tasks of those ids in their order, without those that were deleted after they had ended."""
        names = list(tasks)
        query = "SELECT * FROM tasks WHERE id IN (SELECT value FROM json_each(?))"
        rows = {row["id"]: row for row in self.connection.execute(query, (json.dumps(names),))}
        return [QueueTask.from_row(rows[name]) for name in names if name in rows]

    def stamps(self, state: str, limit: int) -> dict[str, float]:
        """When each of the first tasks in ``state``, users in turn, was last changed: which have to be read anew."""
        rows = rows_in_turn(self.connection, "id, updated", state, limit)
        return {row["id"]: row["updated"] for row in rows}

    def in_turn(self, state: str, limit: int) -> list[QueueTask]:
        """The first tasks of every user in ``state``, one of each in turn."""
        return [QueueTask.from_row(row) for row in rows_in_turn(self.connection, "tasks.*", state, limit)]

    def sweeps(
        self, user: str | None = None, limit: int = 1000, beyond: int = 0, name: str | None = None
    ) -> list[dict[str, Any]]:
        """Sweeps of a user in order of submission, with how many tasks of each are in which state.

        Or the one of that ``name``, with its ``spec``.
        """
        where = "number > ? AND user = coalesce(?, user) AND name = coalesce(?, name) ORDER BY number LIMIT ?"
        counts = "SELECT state, count(*) AS n FROM tasks WHERE sweep = sweeps.name GROUP BY state"
        columns = f"number, name, user, created, (SELECT json_group_object(state, n) FROM ({counts})) AS counts"
        query = f"SELECT {columns}{', spec' if name else ''} FROM sweeps WHERE {where}"
        rows = [dict(row) for row in self.connection.execute(query, (beyond, user, name, limit)).fetchall()]
        return [row | {key: json.loads(row[key]) for key in row.keys() & {"spec", "counts"}} for row in rows]

    def ranked(self, sweep: str) -> list[dict[str, Any]]:
        """Tasks of a sweep with the lowest and with the highest score (one if there is one), and the metric."""
        score = f"json_extract(result, '$.metrics.val_' || {_METRIC})"
        columns = f"id, json_extract(spec, '$.task.name') AS name, {score} AS score, {_METRIC} AS metric"
        where = "sweep = ? AND result IS NOT NULL AND score IS NOT NULL ORDER BY score, position"
        rows = self.connection.execute(f"SELECT {columns} FROM tasks WHERE {where}", (sweep,)).fetchall()
        return [dict(row) for row in (rows if len(rows) < 2 else (rows[0], rows[-1]))]

    def scores_of(self, sweep: str, graph: str) -> list[sqlite3.Row]:
        """Group and scores of the tasks of a sweep on a graph that have ended with them, in order."""
        of_group, scores = "json_extract(result, '$.group') AS batch", "json_extract(result, '$.scores') AS scores"
        where = "sweep = ? AND json_extract(spec, '$.task.graph') = ? AND scores IS NOT NULL"
        query = f"SELECT id, position, {of_group}, {scores} FROM tasks WHERE {where} ORDER BY position"
        return self.connection.execute(query, (sweep, graph)).fetchall()

    def rows_as_json(self, limit: int, beyond: int, **which: str | None) -> tuple[str, list[str], int | None]:
        """Tasks as one JSON text without their plans and results, their ids, and the position to go on beyond.

        ``which``: the values that columns of theirs have, as ``user``; None: any.
        There are fewer than ``limit`` if they have ``MOST_PAGE_BYTES`` before. SQLite makes the text, of many tasks by
        one row: through Python objects it takes three times as long, and other threads have a turn at every row.
        """
        texts: list[str] = []
        names: list[str] = []
        chosen = {name: value for name, value in which.items() if value is not None}
        where = " AND ".join(["position > ?", *(f"{name} = ?" for name in chosen)])
        while (count := limit - len(names)) > 0 and (room := MOST_PAGE_BYTES - sum(map(len, texts))) > 0:
            likely = room * len(names) // (MOST_PAGE_BYTES - room) + 1 if names else 100
            rows = f"SELECT id, position, {_LISTED} AS text FROM tasks WHERE {where} ORDER BY position LIMIT ?"
            query = f"SELECT group_concat(text, ', '), json_group_array(id), max(position) FROM ({rows})"
            values = (beyond, *chosen.values(), min(count, likely, 1000))
            text, ids, last = self.connection.execute(query, values).fetchone()
            if last is None:
                return ", ".join(texts), names, None
            beyond = last
            texts.append(text)
            names += json.loads(ids)
        return ", ".join(texts), names, beyond

    def count_of(self, user: str) -> int:
        """How many tasks of ``user`` have not ended."""
        query = "SELECT count(*) FROM tasks WHERE user = ? AND state IN (?, ?, ?, ?)"
        return int(self.connection.execute(query, (user, *OPEN)).fetchone()[0])

    def bytes_of(self, user: str) -> int:
        """Bytes of the specs of tasks of ``user`` that have not ended, and of their sweeps; each is read for it."""
        query = "SELECT coalesce(sum(length(spec)), 0) FROM tasks WHERE user = ? AND state IN (?, ?, ?, ?)"
        is_open = "EXISTS (SELECT 1 FROM tasks WHERE sweep = sweeps.name AND state IN (?, ?, ?, ?))"
        of_sweeps = f"SELECT coalesce(sum(length(spec)), 0) FROM sweeps WHERE user = ? AND {is_open}"
        return sum(int(self.connection.execute(q, (user, *OPEN)).fetchone()[0]) for q in (query, of_sweeps))

    def last_seq(self) -> int:
        """The sequence number of the last event."""
        return int(self.connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])

    def counts(self) -> dict[str, int]:
        """How many tasks are in each state."""
        rows = self.connection.execute("SELECT state, count(*) AS n FROM tasks GROUP BY state")
        return dict.fromkeys(STATES, 0) | {row["state"]: row["n"] for row in rows}

    def events_as_text(self, since: int, until: int, task: str | None, limit: int) -> tuple[int, str, frozenset[str]]:
        """Events after ``since`` up to ``until`` as server-sent events, the number of the last, and their tasks.

        SQLite makes the text, as one row: while it does so other threads have the interpreter.
        """
        where, values = ("seq > ? AND seq <= ? AND task = ?", (task,)) if task else ("seq > ? AND seq <= ?", ())
        rows = f"SELECT * FROM events WHERE {where} ORDER BY seq LIMIT ?"
        query = f"SELECT max(seq), group_concat({_STREAMED}, ''), json_group_array(DISTINCT task) FROM ({rows})"
        last, text, tasks = self.connection.execute(query, (since, until, *values, limit)).fetchone()
        return last or since, text or "", frozenset(json.loads(tasks))

    def last_events(self, task: str, kinds: Sequence[str], limit: int) -> Sequence[QueueEvent]:
        """The last events of a task of some kinds, in order."""
        where = f"task = ? AND kind IN ({', '.join('?' for _ in kinds)})"
        query = f"SELECT * FROM events WHERE {where} ORDER BY seq DESC LIMIT ?"
        rows = self.connection.execute(query, (task, *kinds, limit)).fetchall()
        return [QueueEvent(**{**dict(row), "data": json.loads(row["data"])}) for row in reversed(rows)]

    def known_keys(self, keys: Sequence[str]) -> int:
        """How many of the keys of submissions were used before."""
        query = f"SELECT count(*) FROM tasks WHERE key IN ({', '.join('?' for _ in keys)})"
        return int(self.connection.execute(query, tuple(keys)).fetchone()[0]) if keys else 0


_METRIC = "json_extract(result, '$.metrics.metric')"
_DEADLINE = "json_extract(spec, '$.deadline')"
_DUE = f"coalesce(created + json_extract(spec, '$.infer.latency_target'), {_DEADLINE})"
_END = "iif(state = 'done', updated, (julianday('now') - 2440587.5) * 86400.0)"  # or now, in seconds since 1970
_LATE = f"json(iif({_DUE} IS NULL, 'null', iif({_END} > {_DUE}, 'true', 'false')))"
_LISTED = f"""json_object(
    'id', id, 'position', position, 'name', coalesce(json_extract(spec, '$.task.name'), ''), 'state', state,
    'kind', coalesce(json_extract(spec, '$.kind'), 'training'),
    'user', user, 'sweep', sweep, 'priority', priority, 'deadline', {_DEADLINE}, 'late', {_LATE},
    'after', json(after), 'attempts', attempts,
    'task', json_extract(spec, '$.task'), 'created', created, 'updated', updated,
    'bytes', json_extract(plan, '$.bytes'), 'seconds', json_extract(plan, '$.seconds'), 'error', error,
    'how', coalesce(json_extract(plan, '$.why'), ''), 'folder', json_extract(result, '$.folder'),
    'metric', {_METRIC}, 'budget', json_extract(spec, '$.budget'),
    'why', iif(state = 'queued', 'waits to be planned', ''),
    'status', json_extract(result, '$.status'),
    'score', iif(result IS NULL, NULL, json_extract(result, '$.metrics.val_' || {_METRIC}))
)"""
_STREAMED = """'id: ' || seq || char(10) || 'event: ' || kind || char(10) || 'data: ' || json_object(
    'seq', seq, 'task', task, 'kind', kind, 'time', time, 'data', json(data)) || char(10) || char(10)"""
SWEEP_CHANGES = {"cancel": ("cancelled", OPEN), "pause": ("paused", OPEN[:3]), "resume": ("queued", ("paused",))}


def _json(value: Any, sort_keys: bool = True) -> str:
    try:
        return json.dumps(value, allow_nan=False, sort_keys=sort_keys)
    except (TypeError, ValueError) as error:
        raise QueueError(f"{str(value)[:80]!r} is not plain JSON data ({error}); numbers must be finite") from None
