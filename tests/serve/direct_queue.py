"""The queue's file as tests use it, task by task, and what must hold of every such file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from weft.serve.queue_db import NEXT_STATES, STATES, QueueDB, QueueEvent, QueueTask, Submission, transaction
from weft.serve.retention import clean_up

CLAIMABLE = """
SELECT * FROM tasks WHERE state = 'planned' AND NOT EXISTS (
    SELECT 1 FROM dependencies JOIN tasks AS needed ON needed.id = dependencies.needs
    WHERE dependencies.task = tasks.id AND needed.state != 'done'
) ORDER BY priority DESC, position LIMIT ?
"""


class DirectQueue(QueueDB):
    """A queue with calls for single tasks, as a worker without a supervisor would make them."""

    def submit(self, submission: Submission) -> QueueTask:
        """Queue a task, or return the one that was queued with the same key."""
        return self.submit_many([submission])[0]

    def submit_many(self, submissions: Iterable[Submission]) -> list[QueueTask]:
        """Queue several tasks in one transaction: all of them or none."""
        with transaction(self.connection):
            return self._submit_all(list(submissions))

    def plan(self, task: str, plan: Mapping[str, Any]) -> QueueTask:
        """Attach a plan to a queued task, which can then be claimed."""
        with transaction(self.connection):
            return self._change(self.get(task), "planned", plan=plan)

    def claim(self, worker: str, lease_seconds: float, limit: int = 1) -> list[QueueTask]:
        """Up to ``limit`` planned tasks whose dependencies are done, now running on ``worker``."""
        with transaction(self.connection):
            rows = self.connection.execute(CLAIMABLE, (limit,)).fetchall()
            claim = {"worker": worker, "lease_until": self._clock() + lease_seconds}
            tasks = [QueueTask.from_row(row) for row in rows]
            return [self._change(task, "running", attempts=task.attempts + 1, **claim) for task in tasks]

    def tasks(
        self, state: str | None = None, user: str | None = None, limit: int = 1000, beyond: int = 0
    ) -> list[QueueTask]:
        """Tasks in order of submission; ``beyond`` is the position of the last one already read."""
        where = "position > ? AND state = coalesce(?, state) AND user = coalesce(?, user)"
        query = f"SELECT * FROM tasks WHERE {where} ORDER BY position LIMIT ?"
        return [QueueTask.from_row(row) for row in self.connection.execute(query, (beyond, state, user, limit))]

    def events(self, since: int = 0, task: str | None = None, limit: int = 1000) -> list[QueueEvent]:
        """Events after the sequence number ``since``, in order."""
        query = "SELECT * FROM events WHERE seq > ? AND task = coalesce(?, task) ORDER BY seq LIMIT ?"
        rows = self.connection.execute(query, (since, task, limit))
        return [QueueEvent(**{**dict(row), "data": json.loads(row["data"])}) for row in rows]


def delete_ended(queue: QueueDB, before: float) -> int:
    """Delete tasks that ended before the time ``before``, and no folders; how many."""
    return clean_up(queue, before, Path(queue.path, "no folder"))


def problems(queue: DirectQueue) -> list[str]:
    """What is wrong with the file, in sentences; empty if nothing is.

    SQLite's own check, then per task: its events lead from queued to its state by allowed changes, it is done at most
    once, it has a worker if and only if it runs, and it was not claimed too often.
    """
    sentences = [row[0] for row in queue.connection.execute("PRAGMA integrity_check") if row[0] != "ok"]
    last = 0
    while tasks := queue.tasks(limit=1000, beyond=last):
        last = tasks[-1].position
        for task in tasks:
            path = [event.kind for event in queue.events(task=task.id, limit=1_000_000) if event.kind in STATES]
            who = f"task {task.id!r}"
            if not path or path[0] != "queued" or path[-1] != task.state:
                sentences.append(f"{who}: events {path} do not lead from queued to {task.state}")
            steps = [(a, b) for a, b in pairwise(path) if b not in NEXT_STATES[a]]
            sentences += [f"{who}: {a} -> {b} is not allowed" for a, b in steps]
            if path.count("done") > 1:
                sentences.append(f"{who}: was completed twice")
            if (task.worker is not None) != (task.state == "running"):
                sentences.append(f"{who} is {task.state} with worker={task.worker!r}")
            if task.attempts > task.max_attempts:
                sentences.append(f"{who}: attempts={task.attempts} exceed max_attempts={task.max_attempts}")
    return sentences
