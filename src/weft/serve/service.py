"""What the HTTP app does with the queue, without HTTP: checks, quotas, files of results, and what a page shows."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from weft.core.errors import WeftError
from weft.serve.options import ServeOptions
from weft.serve.queue_db import QueueDB, Submission
from weft.serve.queue_file import ENDED, STATES, QueueTask
from weft.serve.submissions import OPERATOR, BadRequestError, HiddenPaths, Registry, read_submissions
from weft.serve.supervisor import Supervisor

T = TypeVar("T")
OPEN = tuple(state for state in STATES if state not in ENDED)
MOST_EVENTS = 20_000  # of a learning curve or a log: the last ones
MOST_LOG_BYTES = 1 << 20
MOST_LISTED = 10_000


class QueueService:
    """The queue for request handlers: every call runs in one of two threads, which own the connections."""

    def __init__(self, options: ServeOptions, supervisor: Supervisor) -> None:
        self.options, self.supervisor = options, supervisor
        self._registry, self._hidden = Registry.of(options), HiddenPaths(options.graphs, options.runs)
        self._local = threading.local()
        self.writes = ThreadPoolExecutor(1, thread_name_prefix="queue writes")
        self.reads = ThreadPoolExecutor(1, thread_name_prefix="queue reads")

    def close(self) -> None:
        """Close the connections; a later call opens them again."""
        for pool in (self.writes, self.reads):
            pool.submit(self._close_here).result()

    def _close_here(self) -> None:
        if hasattr(self._local, "db"):
            self._local.db.close()
            del self._local.db

    @property
    def _db(self) -> QueueDB:
        if not hasattr(self._local, "db"):
            self._local.db = QueueDB(self.options.db)
        found: QueueDB = self._local.db
        return found

    # ---- changing: in the thread of writes ---------------------------------------------------------------

    def submit_together(self, requests: Sequence[tuple[Any, str]]) -> list[list[dict[str, Any]] | Exception]:
        """Queue what each body describes for its user, in one commit; per request its tasks, or why it was refused."""
        more: Counter[str] = Counter()
        answers: list[list[dict[str, Any]] | Exception] = [self._read(*request, more) for request in requests]
        good = [place for place, answer in enumerate(answers) if not isinstance(answer, Exception)]
        written = self._db.submit_apart([cast("list[Submission]", answers[place]) for place in good])
        for place, tasks in zip(good, written, strict=True):
            answers[place] = tasks if isinstance(tasks, Exception) else [self._shown(task) for task in tasks]
        self.supervisor.wake()
        return answers

    def _read(self, body: Any, user: str, more: Counter[str]) -> Any:
        """The submissions of a request, counted in ``more`` by user; an error if that is the answer to it."""
        try:
            new = read_submissions(body, self._registry, user, self._task)
            fresh = len(new) - self._db.known_keys([one.key for one in new if one.key])
            self._check_quota(user, fresh, more[user])
            for needed in dict.fromkeys(name for one in new for name in one.after):
                self._task(needed)
        except WeftError as error:
            return error
        more[user] += fresh
        return new

    def _check_quota(self, user: str, new: int, beside: int) -> None:
        """Refuse ``new`` tasks of a user that are too many; ``beside``: those that are written together with them."""
        quota = self.options.quota
        if new > quota:
            most = f"a submission may have at most {quota} tasks, the quota of a user"
            raise BadRequestError(f"user {user!r}: {new} more are too many; {most}", 429)
        there = self._db.count_of(user, OPEN) + beside
        if there + new > quota:
            known = f"{there} of {quota} tasks are queued or running"
            raise BadRequestError(f"user {user!r}: {known}, and {new} more are too many; wait, or cancel some", 429)

    def cancel(self, task: str, user: str) -> dict[str, Any]:
        """Cancel a task."""
        return self._change(self._db_call("cancel"), task, user)

    def pause(self, task: str, user: str) -> dict[str, Any]:
        """Pause a task: it keeps its checkpoint and runs no further."""
        return self._change(self._db_call("pause"), task, user)

    def resume(self, task: str, user: str) -> dict[str, Any]:
        """Queue a paused task again."""
        return self._change(self._db_call("resume"), task, user)

    def _db_call(self, name: str) -> Callable[[str], QueueTask]:
        found: Callable[[str], QueueTask] = getattr(self._db, name)
        return found

    def _change(self, change: Callable[[str], QueueTask], task: str, user: str) -> dict[str, Any]:
        found = self._task(task)
        if user not in (OPERATOR, found.user):
            raise BadRequestError(f"task {task!r} belongs to {found.user or 'the operator'!r}", 403)
        changed = change(task)
        self.supervisor.wake()
        return self._shown(changed)

    # ---- reading: in the thread of reads -----------------------------------------------------------------

    def show(self, task: str) -> dict[str, Any]:
        """One task with everything that is known of it."""
        found = self._task(task)
        return {**self._shown(found), "estimate": self._hidden.data(found.plan), "result": found.result}

    def page(self, state: str | None, user: str | None, limit: int, beyond: int) -> str:
        """Tasks in order of submission, a page at a time, as JSON; ``why`` has the reasons of those that wait."""
        if state is not None and state not in STATES:
            raise BadRequestError(f"state={state[:40]!r} must be one of {', '.join(STATES)}")
        if not 1 <= limit <= MOST_LISTED:
            raise BadRequestError(f"limit={limit} must be from 1 to {MOST_LISTED:,}")
        texts, last = self._db.rows_as_json(state, user, limit, beyond)
        why = json.dumps(self.supervisor.view["why"])
        following = last if len(texts) == limit else "null"
        return self._hidden.json_text(f'{{"tasks": [{", ".join(texts)}], "next": {following}, "why": {why}}}')

    def events(self, since: int, task: str | None, limit: int = 500) -> list[dict[str, Any]]:
        """Events after a sequence number."""
        return [self._hidden.data(event.to_dict()) for event in self._db.events(since, task, limit)]

    def counts(self) -> dict[str, int]:
        """Tasks per state."""
        return self._db.counts()

    def state(self, user: str) -> dict[str, Any]:
        """What the dashboard shows ``user`` beside the tasks."""
        view = self.supervisor.view
        groups = [self._hidden.data(group.to_dict()) for group in self._db.groups(limit=300)]
        shown = {key: value for key, value in view.items() if key != "why"}
        return {**shown, "user": user, "counts": self._db.counts(), "groups": groups, "last_seq": self._db.last_seq()}

    def curve(self, task: str) -> dict[str, Any]:
        """The learning curve of a task, as far as its progress was recorded."""
        self._task(task)
        events = self._db.last_events(task, ("progress",), MOST_EVENTS)
        return {"task": task, "progress": [dict(event.data) for event in events]}

    def log(self, task: str) -> str:
        """What its models printed, and the notes of its run."""
        found = self._task(task)
        notes = self._db.last_events(task, ("note", *STATES), MOST_EVENTS)
        lines = [f"{e.time:.1f} {e.kind} {e.data.get('message') or e.data.get('error') or ''}".rstrip() for e in notes]
        return self._hidden.text("\n".join([*lines, self._printed(found)]))

    def _printed(self, task: QueueTask) -> str:
        folders = [task.id, *([str(task.plan["from"])] if task.plan and task.plan.get("from") else [])]
        folders += [group.folder for group in self._db.groups(limit=1000) if task.id in group.members]
        texts = []
        for folder in dict.fromkeys(folders):
            path = self.options.runs / folder / "log.txt"
            if path.is_file():
                with open(path, "rb") as file:
                    file.seek(max(path.stat().st_size - MOST_LOG_BYTES, 0))
                    texts.append(file.read(MOST_LOG_BYTES).decode("utf-8", "replace"))
        return "\n".join(texts)

    def file(self, task: str, name: str) -> Path:
        """A file that a task left behind, also one that diverged after its best epoch; an error while it has not."""
        found = self._task(task)
        if found.state not in ENDED or not found.result:
            raise BadRequestError(self._hidden.text(_no_file(found, name)), 409)
        path = (self.options.runs / str(found.result["folder"]) / name).resolve()
        if not path.is_relative_to(self.options.runs.resolve()) or not path.is_file():
            raise BadRequestError(f"task {task!r}: its {name} is no longer there", 410)
        return path

    def _task(self, task: str) -> QueueTask:
        from weft.serve.queue_file import QueueError

        try:
            return self._db.get(task)
        except QueueError:
            raise BadRequestError(f"there is no task {task[:80]!r}", 404) from None

    def _shown(self, task: QueueTask) -> dict[str, Any]:
        settings = task.spec["task"]
        plan: Mapping[str, Any] = task.plan or {}
        why = self.supervisor.view["why"].get(task.id, "") if task.state in ("queued", "planned") else ""
        if task.state == "queued" and not why:
            why = "waits to be planned"
        metrics = (task.result or {}).get("metrics", {})
        metric = metrics.get("metric")
        return {
            "id": task.id,
            "position": task.position,
            "name": settings.get("name") or "",
            "kind": task.spec.get("kind", "training"),
            "state": task.state,
            "user": task.user,
            "deadline": task.spec.get("deadline"),
            "budget": task.spec.get("budget"),
            "priority": task.priority,
            "after": list(task.after),
            "attempts": task.attempts,
            "task": settings,
            "created": task.created,
            "updated": task.updated,
            "bytes": plan.get("bytes"),
            "seconds": plan.get("seconds"),
            "why": self._hidden.text(why),
            "error": task.error and self._hidden.text(task.error),
            "score": metrics.get(f"val_{metric}") if metric else None,
            "metric": metric,
        }


def _no_file(task: QueueTask, name: str) -> str:
    """Why a task that is not done has no such file."""
    if task.state == "failed":
        return f"task {task.id!r} failed, so it has no {name}: {task.error or 'no reason is known'}"
    if task.state == "cancelled":
        return f"task {task.id!r} was cancelled, so it has no {name}"
    return f"task {task.id!r} is {task.state}; it has no {name} yet"


# ---- Submissions that arrive while one is written are written together: one commit, and one wait for the disk, for
# all.

Request = TypeVar("Request")
MOST_AT_ONCE = 256


class GroupCommit:
    """``write(requests)`` answers each request with a result or the error that is its own; it runs in ``pool``.

    Used from one event loop. Nobody is answered before the commit that their request is in.
    """

    def __init__(self, pool: Executor, write: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._pool, self._write = pool, write
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def put(self, request: Any) -> Any:
        """The result for ``request``, once it is on the disk."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all())
        return await answer

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
            try:
                found = await loop.run_in_executor(self._pool, self._write, [request for request, _ in batch])
            except Exception as error:  # none of them was written
                found = [error] * len(batch)
            for (_, answer), result in zip(batch, found, strict=True):
                _answer(answer, result)


def _answer(answer: asyncio.Future[Any], result: Any) -> None:
    if answer.done():  # whoever asked has gone
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)


# ---- Figures of a server in Prometheus' text format.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTERS = {
    "groups_started": "Groups started.",
    "tasks_started": "Tasks started, retries included.",
    "workers_lost": "Workers that ended without being asked to.",
    "memory_errors": "Tasks that ran out of memory.",
    "tasks_requeued": "Tasks queued again after their worker was lost.",
    "graphs_ready": "Groups whose graph was on the device when they started.",
    "weights_ready": "Tasks whose initial weights were drawn before they started.",
    "checkpoints_ready": "Groups whose checkpoint was read before they went on.",
}


def metrics_text(view: Mapping[str, Any], counts: Mapping[str, int], requests: Mapping[int, int]) -> str:
    """All figures; ``view`` is the supervisor's, ``counts`` tasks per state, ``requests`` answers per HTTP status."""
    return "\n".join([*_tasks(counts), *_devices(view), *_workers(view), *_counted(view), *_requests(requests), ""])


def _tasks(counts: Mapping[str, int]) -> Iterator[str]:
    yield from _head("weft_tasks", "gauge", "Tasks in the queue by state.")
    for state, count in counts.items():
        yield f'weft_tasks{{state="{state}"}} {count}'


def _devices(view: Mapping[str, Any]) -> Iterator[str]:
    held: dict[str, int] = {}
    estimated: dict[str, int] = {}
    for group in view.get("running", ()):
        held[group["device"]] = held.get(group["device"], 0) + group["held"]
        estimated[group["device"]] = estimated.get(group["device"], 0) + group["bytes"]
    devices = view.get("devices", ())
    rows = {
        "weft_device_budget_bytes": ("Bytes that tasks may take.", {one["name"]: one["budget"] for one in devices}),
        "weft_device_held_bytes": (
            "Bytes held by running groups.",
            {d["name"]: held.get(d["name"], 0) for d in devices},
        ),
        "weft_device_estimated_bytes": (
            "Bytes set aside for running groups.",
            {d["name"]: estimated.get(d["name"], 0) for d in devices},
        ),
    }
    for name, (text, values) in rows.items():
        yield from _head(name, "gauge", text)
        for device, value in values.items():
            yield f'{name}{{device="{device}"}} {value}'


def _workers(view: Mapping[str, Any]) -> Iterator[str]:
    yield from _head("weft_worker_busy", "gauge", "1 for a worker that runs a group, or plans a task.")
    for worker in view.get("workers", ()):
        yield f'weft_worker_busy{{worker="{worker["name"]}"}} {int(bool(worker["group"]))}'


def _counted(view: Mapping[str, Any]) -> Iterator[str]:
    for name, text in COUNTERS.items():
        yield from _head(f"weft_{name}_total", "counter", text)
        yield f"weft_{name}_total {view.get('counters', {}).get(name, 0)}"


def _requests(requests: Mapping[int, int]) -> Iterator[str]:
    yield from _head("weft_http_requests_total", "counter", "HTTP answers by status.")
    for status, count in sorted(requests.items()):
        yield f'weft_http_requests_total{{status="{status}"}} {count}'


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
