"""The folders of runs on the disk: which of them no task of the queue needs any more, and removing those."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from weft.serve.queue.queue_db import QueueDB
from weft.serve.queue.queue_groups import Group
from weft.serve.queue.task_states import ENDED

GROUP = "group-"
NAME = re.compile(rf"(?:{GROUP})?[0-9a-f]{{12}}")  # of a task alone, or of a group
CHECKPOINT = "checkpoint.safetensors"
MOST_SECONDS = 2.0  # that one removal may take; the next one goes on


def remove_unused(queue: QueueDB, runs: Path, more: Iterable[str] = (), seconds: float = MOST_SECONDS) -> list[str]:
    """Remove the folders in ``runs`` that are of no task of the queue; returns their names.

    A folder is there only after its task was queued, so the disk is read first and the queue afterwards. Only folders
    with a name that Weft gives are looked at, and those of ``more``. Links are neither followed nor removed.
    """
    until, removed = time.monotonic() + seconds, []
    for name in unused(queue, _folders(runs, frozenset(more))):
        if time.monotonic() > until:
            break
        shutil.rmtree(runs / name, ignore_errors=True)  # what is left of it is found again the next time
        removed.append(name)
    return removed


def unused(queue: QueueDB, names: Iterable[str]) -> list[str]:
    """Those folders that are of no task: by their name, by a group that is known, or by what a task says of itself."""
    db = queue.connection
    left = [name for name in names if not _is_known(db, name)]
    if not left:
        return []
    mentioned = _mentioned(db)
    return [name for name in left if name not in mentioned]


def _folders(runs: Path, more: frozenset[str]) -> list[str]:
    try:
        with os.scandir(runs) as found:
            return sorted(
                one.name
                for one in found
                if (NAME.fullmatch(one.name) or one.name in more) and one.is_dir(follow_symlinks=False)
            )
    except OSError:  # nothing has run yet, or it cannot be read now
        return []


def _is_known(db: sqlite3.Connection, name: str) -> bool:
    if db.execute("SELECT 1 FROM tasks WHERE id = ?", (name,)).fetchone():
        return True
    return any(db.execute("SELECT 1 FROM tasks WHERE id = ?", (member,)).fetchone() for member in _members(db, name))


def _members(db: sqlite3.Connection, folder: str) -> tuple[str, ...]:
    """The tasks of the group of that folder, as far as it is known."""
    if not folder.startswith(GROUP):
        return ()
    row = db.execute("SELECT members FROM groups WHERE id = ?", (folder.removeprefix(GROUP),)).fetchone()
    return () if row is None else tuple(json.loads(row["members"]))


def _mentioned(db: sqlite3.Connection) -> set[str]:
    """Folders that tasks have their results in, or go on from."""
    query = "SELECT json_extract(result, '$.folder') AS had, json_extract(plan, '$.\"from\"') AS origin FROM tasks"
    places = [place for row in db.execute(query) for place in (row["had"], row["origin"]) if isinstance(place, str)]
    return {place.partition("/")[0] for place in places}


def drop_checkpoints(queue: QueueDB, runs: Path, group: Group) -> int:
    """Remove the checkpoints of a group that a worker has left, unless a task may go on from them; returns how many.

    The last member to end of a group that was dissolved takes those of that group with it.
    """
    db, trained = queue.connection, {group.folder: group.members}
    for name in group.members:
        row = db.execute("SELECT json_extract(plan, '$.\"from\"') FROM tasks WHERE id = ?", (name,)).fetchone()
        if row is not None and row[0]:
            trained.setdefault(row[0], _members(db, row[0]))
    return sum(_drop(runs, folder) for folder, members in trained.items() if members and not _any_open(db, members))


def _any_open(db: sqlite3.Connection, tasks: Sequence[str]) -> bool:
    """Whether one of ``tasks`` has not ended."""
    query = f"SELECT 1 FROM tasks WHERE id = ? AND state NOT IN ({', '.join('?' for _ in ENDED)})"
    return any(db.execute(query, (name, *ENDED)).fetchone() for name in tasks)


def _drop(runs: Path, folder: str) -> int:
    root, dropped = runs.resolve() / folder, 0
    with suppress(OSError):  # a folder that a model made unreadable
        for path in (root / CHECKPOINT, *root.glob(f"groups/*/{CHECKPOINT}")):
            if path.parent.resolve() == path.parent and path.is_file():  # else a link leads elsewhere
                path.unlink()
                dropped += 1
    return dropped
