"""The operations behind the HTTP app, without HTTP: submissions with quotas, changes, listings, files, predictions."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from weft.core.errors import WeftError
from weft.core.settings import lower_is_better
from weft.serve.options import ServeOptions
from weft.serve.queue_db import ENDED, STATES, QueueDB, QueueError, QueueTask, Submission
from weft.serve.state import COUNTERS, ActiveGroup, is_inference, is_resident, run_options_of
from weft.serve.submissions import OPERATOR, THE_OPERATOR, BadRequestError, HiddenPaths, Registry, read_request
from weft.serve.supervisor import Supervisor

MOST_EVENTS = 20_000  # of a learning curve or a log: the last ones
MOST_LOG_BYTES = 1 << 20
MOST_LISTED = 10_000
MOST_SWEEPS = 1_000  # of a page
RENDER_SECONDS = 120.0  # at most for a report
MOST_CHANGES = 100  # of a task, that are shown: the last ones
LARGE_BYTES = 4 << 10  # of settings and nodes per task, beyond which a submission counts against
MOST_USER_BYTES = 32 << 20  # of those of a user's tasks that have not ended: decisions hold them in memory
READERS = 2  # threads: a curve of 20,000 epochs takes 0.2 s, and held up a small submission for as long


class QueueService:
    """The queue for request handlers. Every call runs in one of a few threads, each with its own connection."""

    def __init__(self, options: ServeOptions, supervisor: Supervisor) -> None:
        self.options, self.supervisor = options, supervisor
        self._registry = Registry(options.models, options.graphs, options.downloads)
        self._hidden = HiddenPaths(options.graphs, options.runs)
        self._local = threading.local()
        self.writes = ThreadPoolExecutor(1, thread_name_prefix="queue writes")
        self.reads = ThreadPoolExecutor(READERS, thread_name_prefix="queue reads")
        self.follows = ThreadPoolExecutor(1, thread_name_prefix="queue events")
        self.reports = ThreadPoolExecutor(1, thread_name_prefix="reports")  # each is a process that loads torch

    def close(self) -> None:
        """Close the connections; a later call opens them again."""
        for pool, threads in ((self.writes, 1), (self.reads, READERS), (self.follows, 1)):
            list(pool.map(self._close_here, [threading.Barrier(threads)] * threads))  # every thread closes its own

    def _close_here(self, each: threading.Barrier | None = None) -> None:
        if each is not None:
            each.wait()
        if hasattr(self._local, "db"):
            self._local.db.close()
            del self._local.db

    @property
    def _db(self) -> QueueDB:
        if not hasattr(self._local, "db"):
            self._local.db = QueueDB(self.options.db, owner=self.supervisor.state.owner)
        return self._local.db

    def trouble(self) -> str:
        """Return why the queue is not being worked on; "" if it is."""
        owner = self.supervisor.state.owner
        try:
            if owner is not None:
                owner.check_file(self.options.db)
        except WeftError as error:
            return str(error)
        return "" if self.supervisor.is_alive() else self.supervisor.error or "stopped"

    # ---- changing: in the thread of writes ---------------------------------------------------------------

    def read(self, body: bytes, user: str) -> tuple[list[Submission], int]:
        """Parse a request of ``user`` into submissions and their bytes; in any thread except those of reads."""
        find = lambda task: self.reads.submit(self._task, task).result()  # noqa: E731
        return read_request(body, user, self.options, self._registry, find)

    def submit_together(self, requests: Sequence[tuple[Any, str]]) -> list[list[QueueTask] | Exception]:
        """Queue all requests in one commit; returns the tasks of each, or the error that refused it.

        A request is a body, or what :meth:`read` returned for it, and its user.
        """
        more: Counter[tuple[str, str]] = Counter()
        answers: list[Any] = [self._admit(*request, more) for request in requests]
        written = iter(self._db.submit_apart([answer for answer in answers if not isinstance(answer, Exception)]))
        self.supervisor.wake()
        return [answer if isinstance(answer, Exception) else next(written) for answer in answers]

    def _admit(self, request: Any, user: str, more: Counter[tuple[str, str]]) -> Any:
        """Return the submissions of a request, or the error that refuses it; ``more`` counts those admitted so far."""
        try:
            new, size = self.read(request, user) if isinstance(request, bytes) else request
            user = new[0].user
            fresh = len(new) - self._db.known_keys([submission.key for submission in new if submission.key])
            quota, queued = self.options.quota, self._db.count_of(user) + more[user, "tasks"]
            if fresh > quota:
                most = f"a submission may have at most {quota} tasks, the quota of a user"
                raise BadRequestError(f"user {user!r}: {fresh} more are too many; {most}", 429)
            if queued + fresh > quota:
                state = f"{queued} of {quota} tasks are queued or running"
                raise BadRequestError(
                    f"user {user!r}: {state}, and {fresh} more are too many; wait, or cancel some", 429
                )
            if size > LARGE_BYTES * len(new):  # only then is every open task of the user read
                held = self._db.bytes_of(user) + more[user, "bytes"]
                if fresh and held + size > MOST_USER_BYTES:
                    state = f"the settings of tasks that have not ended have {held:,} of {MOST_USER_BYTES:,} bytes"
                    message = f"user {user!r}: {state}, and {size:,} more are too many; wait, or cancel some"
                    raise BadRequestError(message, 429)
        except WeftError as error:
            return error
        more.update({(user, "tasks"): fresh, (user, "bytes"): size})
        return new

    def change(self, action: Literal["cancel", "pause", "resume"], task: str, user: str) -> dict[str, Any]:
        """Cancel, pause or resume a task for ``user``; a paused task keeps its checkpoint."""
        owner = self._task(task).user
        if user not in (OPERATOR, owner):
            raise BadRequestError(f"task {task!r} belongs to {owner or THE_OPERATOR!r}", 403)
        getattr(self._db, action)(task, user or THE_OPERATOR)
        self.supervisor.wake()
        return self.listed(task)

    def change_sweep(self, action: Literal["cancel", "pause", "resume"], name: str, user: str) -> dict[str, Any]:
        """Cancel, pause or resume for ``user`` the tasks of a sweep that can be; the sweep, and how many were."""
        owner = self._sweep(name)["user"]
        if user not in (OPERATOR, owner):
            raise BadRequestError(f"sweep {name!r} belongs to {owner or THE_OPERATOR!r}", 403)
        changed = self._db.change_sweep(name, action, user or THE_OPERATOR)
        self.supervisor.wake()
        return {**self._hidden.data(self._sweep(name)), "changed": len(changed)}

    # ---- reading: in the threads of reads ----------------------------------------------------------------

    def show(self, task: str) -> dict[str, Any]:
        """Return everything about one task: estimate, result, options, and its last changes of state."""
        shown = self._task(task)
        events = self._db.last_events(task, STATES, MOST_CHANGES)
        changes = [{"time": event.time, "state": event.kind, **self._hidden.data(event.data)} for event in events]
        more = {"estimate": self._hidden.data(shown.plan), "result": shown.result, "changes": changes}
        return {**self.listed(task), **more, "options": run_options_of(shown.spec)}

    def _sweep(self, name: str) -> dict[str, Any]:
        for row in self._db.sweeps(name=name):
            return row
        raise BadRequestError(f"there is no sweep {name[:80]!r}", 404)

    def sweeps(self, user: str | None, limit: int, beyond: int) -> dict[str, Any]:
        """Sweeps in order of submission, a page at a time; ``next`` is what to give as ``beyond`` for the next one."""
        _check_page(limit, beyond)
        rows = self._db.sweeps(user, min(limit, MOST_SWEEPS), beyond)
        return {"sweeps": rows, "next": rows[-1]["number"] if len(rows) == min(limit, MOST_SWEEPS) else None}

    def sweep(self, name: str) -> dict[str, Any]:
        """One sweep: its settings, how many tasks are in which state, and the best of those that are done."""
        sweep, rows = self._sweep(name), self._db.ranked(name)
        metric = rows[0].pop("metric") if rows else None
        best = rows[0 if lower_is_better(f"val_{metric}") else -1] if rows else None
        return self._hidden.data({**sweep, "best": best, "metric": metric})

    def report_sweep(self, name: str) -> str:
        """The report of a sweep as it stands; in the thread of reports."""
        return self._render(self._sweep(name), sweep=name)

    def report_task(self, task: str) -> str:
        """The report of a task that has a result; in the thread of reports."""
        self.file(task, "result.json")
        if is_inference(self._task(task)):
            raise BadRequestError(f"task {task!r} is an inference task, of which there is no report", 409)
        return self._render({}, id=task)

    def _render(self, described: Mapping[str, Any], **which: str) -> str:
        """Render the report of some tasks in a process of its own, since this one imports no torch."""
        members, head = self._rows(MOST_LISTED, **which), json.dumps({**described, "runs": str(self.options.runs)})
        self._close_here()  # the next report may be in a day
        command, sent = [sys.executable, "-m", "weft.serve.sweep_result"], f'{head[:-1]}, "members": [{members}]}}'
        try:
            made = subprocess.run(command, input=sent.encode(), capture_output=True, timeout=RENDER_SECONDS, check=True)
        except subprocess.SubprocessError as error:
            lines = (getattr(error, "stderr", None) or b"it took too long").decode("utf-8", "replace").splitlines()
            raise WeftError(f"the report could not be made ({self._hidden.text(lines[-1][:200])})") from None
        return self._hidden.text(made.stdout.decode())

    def page(self, state: str | None, user: str | None, limit: int, beyond: int, sweep: str | None = None) -> str:
        """Tasks in order of submission, a page at a time, as JSON; ``why`` has the reasons of those that wait.

        ``next`` is what to give as ``beyond`` for the next page, which may come before ``limit`` tasks.
        """
        if state is not None and state not in STATES:
            raise BadRequestError(f"state={state[:40]!r} must be one of {', '.join(STATES)}")
        _check_page(limit, beyond)
        if sweep is not None:
            self._sweep(sweep)
        text, names, following = self._db.rows_as_json(limit, beyond, state=state, user=user, sweep=sweep)
        reasons = self.supervisor.view["why"]
        why = json.dumps({name: reasons[name] for name in names if name in reasons})
        return self._hidden.text(f'{{"tasks": [{text}], "next": {json.dumps(following)}, "why": {why}}}')

    def events(self, since: int, until: int, task: str | None) -> tuple[int, bytes, frozenset[str]]:
        """The number of the last of a page of events, their text, and of which tasks they are."""
        last, text, tasks = self._db.events_as_text(since, until, task, PAGE_EVENTS)
        return last, self._hidden.text(text).encode(), tasks

    def metrics(self, answers: Mapping[int, int]) -> str:
        """The figures for Prometheus; ``answers``: how many per HTTP status."""
        return metrics_text(self.supervisor.view, self._db.counts(), answers)

    def state(self, user: str) -> dict[str, Any]:
        """Return what the dashboard shows ``user`` in addition to the tasks: devices, workers, groups, counts."""
        view = self.supervisor.view
        groups = [self._hidden.data(asdict(group)) for group in self._db.groups(limit=300)]
        shown = {key: value for key, value in view.items() if key != "why"}
        return {**shown, "user": user, "counts": self._db.counts(), "groups": groups, "last_seq": self._db.last_seq()}

    def curve(self, task: str) -> dict[str, Any]:
        """The learning curve of a task, as far as its progress was recorded."""
        self._task(task)
        events = self._db.last_events(task, ("progress",), MOST_EVENTS)
        return {"task": task, "progress": [dict(event.data) for event in events]}

    def log(self, task: str) -> str:
        """Return the output of a task's model and the notes of its run."""
        entry = self._task(task)
        notes = self._db.last_events(task, ("note", *STATES), MOST_EVENTS)
        texts = [f"{e.time:.1f} {e.kind} {_note(e.data)}".rstrip() for e in notes]
        folders = [entry.id, *([str(entry.plan["from"])] if entry.plan and entry.plan.get("from") else [])]
        folders += [group.folder for group in self._db.groups(limit=1000) if entry.id in group.members]
        paths = [self.options.runs / folder / "log.txt" for folder in dict.fromkeys(folders)]
        for path in filter(Path.is_file, paths):
            with open(path, "rb") as file:
                file.seek(max(path.stat().st_size - MOST_LOG_BYTES, 0))
                texts.append(file.read(MOST_LOG_BYTES).decode("utf-8", "replace"))
        return self._hidden.text("\n".join(texts))

    def file(self, task: str, name: str) -> Path:
        """A file that a task left behind, also one that diverged after its best epoch; an error while it has not."""
        entry = self._task(task)
        if entry.state not in ENDED or not entry.result:
            reason = f"task {entry.id!r} is {entry.state}; it has no {name} yet"
            if entry.state == "failed":
                reason = f"task {entry.id!r} failed, so it has no {name}: {entry.error or 'no reason is known'}"
            elif entry.state == "cancelled":
                reason = f"task {entry.id!r} was cancelled, so it has no {name}"
            raise BadRequestError(self._hidden.text(reason), 409)
        path = (self.options.runs / str(entry.result["folder"]) / name).resolve()
        if not path.is_relative_to(self.options.runs.resolve()) or not path.is_file():
            raise BadRequestError(f"task {task!r}: its {name} is no longer there", 410)
        return path

    def result(self, task: str) -> str:
        """The ``result.json`` of a task, with its graph as it was submitted rather than where it lies."""
        result = json.loads(self.file(task, "result.json").read_text(encoding="utf-8"))
        result["task"]["graph"] = self._task(task).spec["task"].get("graph", result["task"]["graph"])
        return self._hidden.text(json.dumps(result, indent=2))

    def resident_of(self, task: str, resident: str | None) -> str | None:
        """Return the resident task that answers for ``task``: itself, or ``resident`` if that has not ended; else None.

        A :class:`BadRequestError` if ``task`` has no weights to load.
        """
        entry = self._task(task)
        if is_inference(entry):
            if not is_resident(entry) or entry.state in ENDED:
                raise BadRequestError(f"task {task!r} is not resident; name the task that was trained", 409)
            return task
        self.file(task, "model.safetensors")
        with suppress(QueueError):
            return resident if resident is not None and self._db.get(resident).state not in ENDED else None
        return None

    def _task(self, task: str) -> QueueTask:
        try:
            return self._db.get(task)
        except QueueError:
            raise BadRequestError(f"there is no task {task[:80]!r}", 404) from None

    def listed(self, task: str) -> dict[str, Any]:
        """A task as a user sees it."""
        row: dict[str, Any] = json.loads(self._rows(1, id=task))
        why = self.supervisor.view["why"].get(task) if row["state"] in ("queued", "planned") else None
        return row | ({"why": self._hidden.text(why)} if why else {})

    def submitted(self, tasks: Sequence[QueueTask]) -> str:
        """The answer to a submission, as JSON."""
        return f'{{"tasks": [{self._rows(len(tasks), tasks[0].position - 1)}]}}'

    def _rows(self, count: int, beyond: int | None = 0, **which: str) -> str:
        """Up to ``count`` tasks as users see them, as JSON."""
        texts = list[str]()
        while count > 0 and beyond is not None:
            text, names, beyond = self._db.rows_as_json(count, beyond, **which)
            texts, count = [*texts, *filter(None, [text])], count - len(names)
        return self._hidden.text(", ".join(texts))


def _check_page(limit: int, beyond: int) -> None:
    if not 1 <= limit <= MOST_LISTED:
        raise BadRequestError(f"limit={limit} must be from 1 to {MOST_LISTED:,}")
    if not 0 <= beyond < 2**62:
        raise BadRequestError(f"beyond={beyond} must be a position, 0 or more")


def _note(data: Mapping[str, Any]) -> str:
    return data.get("message") or data.get("error") or (f"by {data['by']}" if "by" in data else "")


# ---- Events as text, made once for all who follow them.

POLL_SECONDS, PAGE_EVENTS = 0.25, 500
MOST_RECENT_BYTES = 16 << 20  # of events in memory, about 100,000


class EventFeed:
    """Pages of events by the number of the event before each: all clients at that number get the same text.

    Clients that wait for new events share one poll of the queue. Only the last pages are kept in memory.
    """

    def __init__(self, service: QueueService) -> None:
        self._service, self._last, self._turn = service, -1, asyncio.Lock()
        self._polling: asyncio.Task[None] | None = None
        self._pages: dict[int, tuple[int, bytes, frozenset[str]]] = {}

    async def after(self, since: int, task: str | None) -> tuple[int, bytes]:
        """The number to go on from, and the events after ``since`` (of ``task``); waits a while if there are none."""
        if since >= self._last:
            if self._polling is None or self._polling.done():
                self._polling = asyncio.create_task(self._find_new())
            await asyncio.shield(self._polling)
            if since >= self._last:
                return since, b""
        until, page = self._last, self._pages.get(since)
        if task is not None and page is not None and task not in page[2]:
            return page[0], b""
        last, text, _ = await self._page(since, until, task)
        return (last, text) if text else (until, b"")

    async def _find_new(self) -> None:
        await asyncio.sleep(POLL_SECONDS if self._last >= 0 else 0.0)
        if self._last < 0:
            self._last = await asyncio.wrap_future(self._service.follows.submit(lambda: self._service._db.last_seq()))
        while (last := (await self._page(self._last, 2**62, None))[0]) > self._last:
            self._last = last

    async def _page(self, since: int, until: int, task: str | None) -> tuple[int, bytes, frozenset[str]]:
        async with self._turn:  # one after another: other requests come between, and a page is read once
            if task is None and since in self._pages:
                await asyncio.sleep(0)
                return self._pages[since]
            page = await asyncio.wrap_future(self._service.follows.submit(self._service.events, since, until, task))
            if task is None and page[1]:
                self._pages[since] = page
            while sum(len(text) for _, text, _ in self._pages.values()) > MOST_RECENT_BYTES:
                del self._pages[next(iter(self._pages))]
            return page


# ---- Predictions at once, by models that stay loaded in a worker. The first request for one submits it to the queue.

LOADED_SECONDS, ANSWER_SECONDS = 30.0, 30.0  # that a request waits for a model, and for its answer
POLL_LOADED_SECONDS, POLL_STATE_SECONDS = 0.01, 0.5  # between two checks whether it is loaded, and whether it failed


class ResidentModels:
    """Predicts with resident models, which it loads by ``submit(body, user)``: this queues a resident task."""

    def __init__(self, service: QueueService, submit: Callable[[tuple[bytes, str]], Awaitable[Any]]) -> None:
        self._service, self._submit, self._turn = service, submit, asyncio.Lock()
        self._submitted: dict[str, str] = {}  # by the task that was trained: its resident one

    async def predict(self, request: Mapping[str, Any], user: str) -> dict[str, Any]:
        """Return the predictions for the nodes of a request, or raise a :class:`BadRequestError`."""
        question = {name: request[name] for name in ("nodes", "fanout", "seed")}
        for _ in range(2):  # the model may leave just now
            active = self._service.supervisor.resident(request["task"]) or await self._loaded(request, user)
            future = asyncio.wrap_future(active.worker.ask(active.group.id, **question))
            try:
                answer = dict(await asyncio.wait_for(future, ANSWER_SECONDS))
            except TimeoutError:
                raise BadRequestError(f"the model did not answer within {ANSWER_SECONDS:g} s; try again", 503) from None
            if "error" in answer or "failed" in answer:
                status = 400 if "error" in answer else 503
                raise BadRequestError(self._service._hidden.text(answer.get("error") or answer["failed"]), status)
            if not answer.pop("gone", False):
                return {"task": request["task"], **{k: v for k, v in answer.items() if k not in ("say", "id")}}
        raise BadRequestError("the model makes way for other tasks; try again", 503)

    async def _loaded(self, request: Mapping[str, Any], user: str) -> ActiveGroup:
        """Return the group of the model, once it is loaded."""
        service, task = self._service, request["task"]
        async with self._turn:
            reads = asyncio.get_running_loop().run_in_executor
            name = await reads(service.reads, service.resident_of, task, self._submitted.get(task))
            if name is None:
                infer = {"of": task, "resident": True, "latency_target": request["latency_target"]}
                (queued,) = await self._submit((json.dumps({"infer": infer}).encode(), user))
                name = self._submitted[task] = queued.id
        end, next_look, shown = time.monotonic() + LOADED_SECONDS, 0.0, {}
        while (active := service.supervisor.resident(name)) is None:
            now = time.monotonic()
            if now > next_look:
                shown, next_look = await reads(service.reads, service.show, name), now + POLL_STATE_SECONDS
            if shown["state"] in ENDED or now > end:
                why = shown["error"] or shown["why"] or f"it is {shown['state']}"
                if shown["state"] == "failed":
                    raise BadRequestError(f"the model of task {task!r} cannot be loaded: {why}", 409)
                raise BadRequestError(f"the model of task {task!r} is not loaded yet: {why}; try again", 503)
            await asyncio.sleep(POLL_LOADED_SECONDS)
        return active


# ---- Submissions that arrive while another is written share one commit, and one wait for the disk.

MOST_AT_ONCE = 256


class GroupCommit:
    """``write(requests)`` answers each request with a result or the error that is its own; it runs in ``pool``.

    ``pool`` has one thread. A request is answered after the commit that it is part of.
    """

    def __init__(self, pool: Executor, write: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._pool, self._write, self._writing = pool, write, asyncio.Lock()
        self._waiting: deque[tuple[Any, list[Any]]] = deque()  # requests, each with a list that gets its answer

    async def put(self, request: Any) -> Any:
        """The result for ``request``, once it is on the disk."""
        answer: list[Any] = []
        self._waiting.append((request, answer))
        try:
            while not answer:
                async with self._writing:
                    if not answer:
                        await asyncio.get_running_loop().run_in_executor(self._pool, self._write_waiting)
        except asyncio.CancelledError as error:  # its client has gone: do not write it with the next ones
            answer.append(error)
            raise
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def _write_waiting(self) -> None:
        """Write the requests that wait. In the thread, so that all are answered though one of them is cancelled."""
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_AT_ONCE))]
        batch = [(request, answer) for request, answer in batch if not answer]
        try:
            results = self._write([request for request, _ in batch])
        except Exception as error:  # none of them was written
            results = [error] * len(batch)
        for (_, answer), result in zip(batch, results, strict=True):
            answer.append(result)


# ---- Figures of a server in Prometheus' text format.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(view: Mapping[str, Any], counts: Mapping[str, int], requests: Mapping[int, int]) -> str:
    """All figures; ``view`` is the supervisor's, ``counts`` tasks per state, ``requests`` answers per HTTP status."""
    devices, totals = view.get("devices", ()), view.get("counters", {})
    budgets, held, aside = ({each["name"]: each[key] for each in devices} for key in ("budget", "bytes", "estimate"))
    busy = {worker["name"]: int(bool(worker["group"])) for worker in view.get("workers", ())}
    figures: list[tuple[str, str, str, str, Mapping[Any, int]]] = [  # name, type, help, label, values by label
        ("weft_tasks", "gauge", "Tasks in the queue by state.", "state", counts),
        ("weft_device_budget_bytes", "gauge", "Bytes that tasks may take.", "device", budgets),
        ("weft_device_held_bytes", "gauge", "Bytes held by running groups.", "device", held),
        ("weft_device_estimated_bytes", "gauge", "Bytes set aside for running groups.", "device", aside),
        ("weft_worker_busy", "gauge", "1 for a worker that runs a group, or plans a task.", "worker", busy),
        *((f"weft_{name}_total", "counter", text, "", {"": totals.get(name, 0)}) for name, text in COUNTERS.items()),
        ("weft_http_requests_total", "counter", "HTTP answers by status.", "status", dict(sorted(requests.items()))),
    ]
    lines = []
    for name, kind, text, label, values in figures:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f'{name}{{{label}="{key}"}} {value}' if label else f"{name} {value}" for key, value in values.items()]
    return "\n".join([*lines, ""])
