"""Keep the durable queue small and sound: delete what ended long ago, check the invariants."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from weft.serve.queue.queue_db import QueueDB
from weft.serve.queue.queue_file import transaction
from weft.serve.queue.run_folders import remove_unused
from weft.serve.queue.task_states import ENDED, NEXT_STATES, STATES

BATCH = 1000


def clean_up(queue: QueueDB, before: float, runs: Path) -> int:
    """Delete tasks that ended before the time ``before``, then the folders in ``runs`` of no task; how many tasks.

    A crash in between leaves folders, which the next clean-up removes.
    """
    gone = _delete(queue, before)
    remove_unused(queue, runs, gone)
    return len(gone)


def delete_ended(queue: QueueDB, before: float) -> int:
    """Delete tasks that ended before the time ``before``, with their events; returns how many.

    A task that something unfinished depends on, or whose group goes on, is kept. Sequence numbers of deleted events are
    not used again.
    """
    return len(_delete(queue, before))


def _delete(queue: QueueDB, before: float) -> list[str]:
    marks = ", ".join("?" for _ in ENDED)
    with transaction(queue.connection) as db:
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
    return names


_IN_OPEN_GROUPS = """
SELECT member.value FROM groups, json_each(groups.members) AS member WHERE groups.state IN ('running', 'preempted')
"""
_DELETE_GROUPS = """
DELETE FROM groups WHERE state IN ('ended', 'dissolved') AND ended < ? AND NOT EXISTS (
    SELECT 1 FROM json_each(groups.members) AS member JOIN tasks ON tasks.id = member.value)
"""


def problems(queue: QueueDB) -> list[str]:
    """What is wrong with the file, in sentences; empty if nothing is.

    SQLite's own check, then per task: its events lead from queued to its state by allowed changes, it is done at most
    once, it has a worker if and only if it runs, and it was not claimed too often.
    """
    found = [row[0] for row in queue.connection.execute("PRAGMA integrity_check") if row[0] != "ok"]
    last = 0
    while tasks := queue.tasks(limit=BATCH, beyond=last):
        last = tasks[-1].position
        for task in tasks:
            path = [event.kind for event in queue.events(task=task.id, limit=1_000_000) if event.kind in STATES]
            found += [f"task {task.id!r}: {message}" for message in _path_problems(path, task.state)]
            if (task.worker is not None) != (task.state == "running"):
                found.append(f"task {task.id!r} is {task.state} with worker={task.worker!r}")
            if task.attempts > task.max_attempts:
                found.append(f"task {task.id!r}: attempts={task.attempts} exceed max_attempts={task.max_attempts}")
    return found


def _path_problems(path: list[str], state: str) -> list[str]:
    found = []
    if not path or path[0] != "queued" or path[-1] != state:
        found.append(f"events {path} do not lead from queued to {state}")
    found += [f"{a} -> {b} is not allowed" for a, b in pairwise(path) if b not in NEXT_STATES[a]]
    if path.count("done") > 1:
        found.append("was completed twice")
    return found
