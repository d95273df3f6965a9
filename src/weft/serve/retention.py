"""Keep the durable queue small and sound: delete what ended long ago, and its files."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from weft.serve.queue_db import ENDED, Group, QueueDB

# ---- Folders of runs that no task needs any more

GROUP = "group-"
NAME = re.compile(rf"(?:{GROUP})?[0-9a-f]{{12}}")  # of a task alone, or of a group
CHECKPOINT = "checkpoint.safetensors"
MOST_SECONDS = 2.0  # that one removal may take; the next one continues


def remove_unused(queue: QueueDB, runs: Path, more: Iterable[str]) -> None:
    """Remove the folders in ``runs`` that are of no task of the queue.

    A folder is there only after its task was queued, so the disk is read first and the queue afterwards. Only folders
    with a name that Weft gives are considered, and those of ``more``. Links are neither followed nor removed.
    """
    until = time.monotonic() + MOST_SECONDS
    db, unknown = queue.connection, []
    known = frozenset(more)
    try:
        with os.scandir(runs) as entries:
            named = [entry for entry in entries if NAME.fullmatch(entry.name) or entry.name in known]
            folders = sorted(entry.name for entry in named if entry.is_dir(follow_symlinks=False))
    except OSError:  # nothing has run yet, or it cannot be read now
        return
    for name in folders:  # a folder is of a task by its name, or by a group that is known
        tasks = (name, *_members(db, name))
        if not any(db.execute("SELECT 1 FROM tasks WHERE id = ?", (task,)).fetchone() for task in tasks):
            unknown.append(name)
    if not unknown:
        return
    # Folders that hold results of tasks, or that tasks continue from.
    query = "SELECT json_extract(result, '$.folder') AS had, json_extract(plan, '$.\"from\"') AS origin FROM tasks"
    paths = [path for row in db.execute(query) for path in (row["had"], row["origin"]) if isinstance(path, str)]
    mentioned = {path.partition("/")[0] for path in paths}
    for name in (name for name in unknown if name not in mentioned):
        if time.monotonic() > until:
            return
        shutil.rmtree(runs / name, ignore_errors=True)  # what is left of it is found again the next time


def _members(db: sqlite3.Connection, folder: str) -> tuple[str, ...]:
    """The tasks of the group of that folder, as far as it is known."""
    if not folder.startswith(GROUP):
        return ()
    row = db.execute("SELECT members FROM groups WHERE id = ?", (folder.removeprefix(GROUP),)).fetchone()
    return () if row is None else tuple(json.loads(row["members"]))


def drop_checkpoints(queue: QueueDB, runs: Path, group: Group) -> None:
    """Remove the checkpoints of a group that a worker has left, unless a task may go on from them.

    The last member to end of a group that was dissolved takes those of that group with it.
    """
    db, trained = queue.connection, {group.folder: group.members}
    for name in group.members:
        row = db.execute("SELECT json_extract(plan, '$.\"from\"') FROM tasks WHERE id = ?", (name,)).fetchone()
        if row is not None and row[0]:
            trained.setdefault(row[0], _members(db, row[0]))
    query = f"SELECT 1 FROM tasks WHERE id = ? AND state NOT IN ({', '.join('?' for _ in ENDED)})"
    for folder, members in trained.items():
        if not members or any(db.execute(query, (name, *ENDED)).fetchone() for name in members):
            continue
        root = runs.resolve() / folder
        with suppress(OSError):  # a folder that a model made unreadable
            for path in (root / CHECKPOINT, *root.glob(f"groups/*/{CHECKPOINT}")):
                if path.parent.resolve() == path.parent and path.is_file():  # else a link leads elsewhere
                    path.unlink()


FAR_SECONDS, SLACK_SECONDS = 7 * 86_400.0, 3_600.0  # ahead of, and behind, the last time that was right


def clock_trouble(queue: QueueDB, keep_seconds: float | None, now: float) -> str:
    """Why nothing may be deleted by a clock that says ``now``; "" if it can be right, which the queue remembers.

    By a clock that is a year ahead everything would be old. So one that is further from the time that was last right
    than servers usually rest deletes nothing; a server that deletes nothing (None) takes every time for right.
    """
    with queue.writing() as db:
        db.execute("INSERT OR IGNORE INTO server (id) VALUES (0)")
        last = db.execute("SELECT clock FROM server").fetchone()[0]
        far = max(min(keep_seconds or 0.0, FAR_SECONDS), SLACK_SECONDS)
        if keep_seconds is not None and last is not None and not -SLACK_SECONDS <= now - last <= far:
            today, then = (time.strftime("%Y-%m-%d", time.localtime(seconds)) for seconds in (now, last))
            remedy = "set the clock, or if it is right start the server once without --keep-days"
            return f"--keep-days deletes nothing: it is {today} by the clock and was {then} before; {remedy}"
        db.execute("UPDATE server SET clock = ?", (now,))
    return ""


def clean_up(queue: QueueDB, before: float, runs: Path) -> int:
    """Delete tasks that ended before the time ``before``, then the folders in ``runs`` of no task; how many tasks.

    A crash in between leaves folders, which the next clean-up removes. A task that something unfinished depends on, or
    whose group continues, is kept. Sequence numbers of deleted events are not used again.
    """
    marks = ", ".join("?" for _ in ENDED)
    with queue.writing() as db:
        rows = db.execute(
            f"SELECT id FROM tasks WHERE state IN ({marks}) AND updated < ? AND NOT EXISTS ("
            " SELECT 1 FROM dependencies JOIN tasks AS later ON later.id = dependencies.task"
            f" WHERE dependencies.needs = tasks.id AND later.state NOT IN ({marks}))"
            f" AND id NOT IN ({_IN_OPEN_GROUPS})",
            (*ENDED, before, *ENDED),
        ).fetchall()
        names = [row["id"] for row in rows]
        for table, column in (("events", "task"), ("dependencies", "task"), ("tasks", "id")):
            db.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(name,) for name in names])
        db.execute(_DELETE_GROUPS, (before,))
        db.execute("DELETE FROM sweeps WHERE NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.sweep = sweeps.name)")
    remove_unused(queue, runs, names)
    return len(names)


_IN_OPEN_GROUPS = """
SELECT member.value FROM groups, json_each(groups.members) AS member WHERE groups.state IN ('running', 'preempted')
"""
_DELETE_GROUPS = """
DELETE FROM groups WHERE state IN ('ended', 'dissolved') AND ended < ? AND NOT EXISTS (
    SELECT 1 FROM json_each(groups.members) AS member JOIN tasks ON tasks.id = member.value)
"""
