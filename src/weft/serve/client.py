"""Client: a queue server from Python, with the standard library alone."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.core.errors import InputError, WeftError
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.serve.http.submissions import tasks_of
from weft.serve.queue.task_states import ENDED

DEFAULT_SERVER = "http://127.0.0.1:8787"
PATIENCE, RETRY_SECONDS = 300.0, 0.5  # how long a server that is away is waited for, and between two attempts
SERVER_VARIABLE, TOKEN_VARIABLE = "WEFT_SERVER", "WEFT_TOKEN"


class ServerError(WeftError):
    """The server could not be reached, or something is wrong with it."""


class UnreachableError(ServerError):
    """Nothing answers at the address: the server has ended, is being started again, or was never there."""


class Client:
    """The queue at ``server`` (``$WEFT_SERVER``, else ``http://127.0.0.1:8787``).

    ``token``: the token itself, or the path of a file with one (``$WEFT_TOKEN``); None on a server that needs none.

    >>> client = weft.Client()
    >>> tasks = client.submit(weft.Sweep("demo", model="gcn", seed=range(4)))
    >>> client.wait(tasks)
    >>> client.fetch(tasks[0]["id"], "results")
    """

    def __init__(self, server: str | None = None, token: str | os.PathLike[str] | None = None, timeout: float = 30.0):
        self.server = (server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER).rstrip("/")
        parts = urllib.parse.urlsplit(self.server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"server {self.server!r}: expected an address such as {DEFAULT_SERVER}")
        self._token = _token(token if token is not None else os.environ.get(TOKEN_VARIABLE))
        self._timeout = timeout
        handlers: list[Any] = [_NoRedirect()]
        if _is_loopback(parts.hostname):
            handlers.append(urllib.request.ProxyHandler({}))  # a proxy is of no use for this machine
        self._opener = urllib.request.build_opener(*handlers)

    # ---- changing ----------------------------------------------------------------------------------------

    def submit(
        self,
        work: Task | Sweep | Sequence[Task],
        *,
        key: str | None = None,
        priority: int = 0,
        after: Sequence[str] = (),
        budget: str | int | None = None,
        deadline: float | None = None,
        user: str | None = None,
    ) -> list[dict[str, Any]]:
        """Queue a task, or every task of a sweep, all or none; returns them as the server shows them.

        ``key``: the same key queues the same work only once, so a submission can be repeated safely. ``after``: ids of
        tasks that must be done before. ``budget``: bytes that each task may take. ``deadline``: seconds since 1970.
        """
        body: dict[str, Any] = {"tasks": tasks_of(work), "priority": priority, "after": list(after)}
        given = {"key": key, "budget": budget, "deadline": deadline, "user": user}
        body |= {name: value for name, value in given.items() if value is not None}
        found: list[dict[str, Any]] = self._json("POST", "/api/tasks", body)["tasks"]
        return found

    def infer(
        self,
        of: str | None = None,
        *,
        task: Task | None = None,
        weights: str | None = None,
        nodes: str | Sequence[int] | None = None,
        graph: str | None = None,
        latency_target: float | None = None,
        key: str | None = None,
        priority: int = 0,
        after: Sequence[str] = (),
        user: str | None = None,
    ) -> dict[str, Any]:
        """Queue an inference task: the logits of a trained model, which :meth:`fetch` downloads.

        ``of``: the task whose best weights to use, once it is done; or ``task``, settings, with ``weights``, a
        safetensors file in the server's folder of graphs. ``nodes``: ``"test"`` or another split, ids, or None for
        all. ``graph``: another one than the model was trained on. ``latency_target``: seconds from now to the answer,
        by which the scheduler gives it precedence over trainings.
        """
        asked: dict[str, Any] = {"of": of, "weights": weights, "graph": graph, "latency_target": latency_target}
        asked["nodes"] = nodes if nodes is None or isinstance(nodes, str) else [int(node) for node in nodes]
        infer = {name: value for name, value in asked.items() if value is not None}
        body: dict[str, Any] = {"infer": infer, "priority": priority, "after": list(after)}
        given = {"task": None if task is None else tasks_of(task)[0], "key": key, "user": user}
        body |= {name: value for name, value in given.items() if value is not None}
        found: dict[str, Any] = self._json("POST", "/api/tasks", body)["tasks"][0]
        return found

    def cancel(self, task: str) -> dict[str, Any]:
        """Cancel a task."""
        return self._change(task, "cancel")

    def pause(self, task: str) -> dict[str, Any]:
        """Keep a task from running until it is resumed; a running one saves a checkpoint first."""
        return self._change(task, "pause")

    def resume(self, task: str) -> dict[str, Any]:
        """Queue a paused task again."""
        return self._change(task, "resume")

    def _change(self, task: str, what: str) -> dict[str, Any]:
        found: dict[str, Any] = self._json("POST", f"/api/tasks/{_quoted(task)}/{what}", {})
        return found

    # ---- reading -----------------------------------------------------------------------------------------

    def tasks(self, state: str | None = None, user: str | None = None) -> list[dict[str, Any]]:
        """All tasks in order of submission, or those of a state or a user."""
        found: list[dict[str, Any]] = []
        beyond: int | None = 0
        while beyond is not None:
            asked = {"state": state, "user": user, "limit": 5000, "beyond": beyond}
            query = urllib.parse.urlencode({name: value for name, value in asked.items() if value is not None})
            page = self._json("GET", f"/api/tasks?{query}")
            found += [{**task, "why": _why(task, page["why"])} for task in page["tasks"]]
            beyond = page["next"]
        return found

    def show(self, task: str) -> dict[str, Any]:
        """One task with its estimate, why it waits, and its result."""
        found: dict[str, Any] = self._json("GET", f"/api/tasks/{_quoted(task)}")
        return found

    def logs(self, task: str) -> str:
        """What a task printed, and the notes of its run."""
        return self._bytes("GET", f"/api/tasks/{_quoted(task)}/logs").decode("utf-8", "replace")

    def state(self) -> dict[str, Any]:
        """Devices, workers, running groups, and how many tasks are in which state."""
        found: dict[str, Any] = self._json("GET", "/api/state")
        return found

    def result(self, task: str) -> dict[str, Any]:
        """Settings, metrics and history of a task that is done: what is in its ``result.json``."""
        found: dict[str, Any] = self._json("GET", f"/api/tasks/{_quoted(task)}/result")
        return found

    def fetch(self, task: str, folder: str | os.PathLike[str]) -> Path:
        """Download the files of a task that is done into ``folder/TASK``; returns that folder.

        They are ``result.json``, and ``model.safetensors`` of a training or ``predictions.safetensors`` of an inference
        task: its ``nodes`` [R] and their ``logits`` [R, C]. ``kept.safetensors``: what a user's module keeps beside its
        weights, if it does.
        """
        place = Path(folder) / _safe_name(task)
        place.mkdir(parents=True, exist_ok=True)
        inferred = self.show(task)["kind"] == "inference"
        other = ("predictions.safetensors", "predictions") if inferred else ("model.safetensors", "weights")
        kept = [("kept.safetensors", "kept")] if "kept" in self.result(task) else []
        for name, kind in (("result.json", "result"), other, *kept):
            partial = place / f".{name}.partial"
            with self._open("GET", f"/api/tasks/{_quoted(task)}/{kind}") as answer, open(partial, "wb") as file:
                while chunk := answer.read(1 << 20):
                    file.write(chunk)
            os.replace(partial, place / name)
        return place

    def events(
        self,
        since: int = 0,
        task: str | None = None,
        patience: float = PATIENCE,
        on_lost: Callable[[str], None] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Events after the sequence number ``since``, as they happen.

        Where a connection was lost, as when the server is started again, it goes on after the last event that was
        seen; an error once the server was away for ``patience`` seconds. ``on_lost`` is told that it waits.
        """
        query = "" if task is None else "?" + urllib.parse.urlencode({"task": task})
        met = False
        while True:
            if met:
                self._until_back(patience, on_lost)
            try:
                with self._open("GET", f"/api/events{query}", last=since) as answer:
                    met = True
                    for raw in answer:
                        if raw.startswith(b"data: "):
                            event: dict[str, Any] = json.loads(raw[6:])
                            since = event["seq"]
                            yield event
            except (OSError, http.client.HTTPException, UnreachableError):
                if not met:
                    raise

    def _until_back(self, patience: float, on_lost: Callable[[str], None] | None) -> None:
        """Return once the server answers again."""
        until, told = time.monotonic() + patience, False
        while True:
            time.sleep(RETRY_SECONDS)
            try:
                self.state()
                return
            except (UnreachableError, OSError, http.client.HTTPException) as error:
                if time.monotonic() > until:
                    words = f"{self.server} was lost and did not come back within {patience:.0f} s"
                    raise UnreachableError(f"{words}; its tasks go on where they were once it is started") from error
            if not told and on_lost is not None:
                on_lost(f"the connection to {self.server} was lost; waiting up to {patience:.0f} s for it to come back")
            told = True

    def wait(self, tasks: Sequence[str | dict[str, Any]], seconds: float | None = None) -> list[dict[str, Any]]:
        """Return once all of ``tasks`` (ids, or what :meth:`submit` returned) have ended; how they stand then."""
        names = [task if isinstance(task, str) else str(task["id"]) for task in tasks]
        until = None if seconds is None else time.monotonic() + seconds
        found = [self.show(name) for name in names]
        while not all(task["state"] in ENDED for task in found):
            if until is not None and time.monotonic() > until:
                left = sum(task["state"] not in ENDED for task in found)
                raise ServerError(f"{left} of {len(found)} tasks have not ended after {seconds:g} s")
            time.sleep(0.2)
            try:
                found = [task if task["state"] in ENDED else self.show(task["id"]) for task in found]
            except (UnreachableError, OSError, http.client.HTTPException):
                left_over = PATIENCE if until is None else max(until - time.monotonic(), 0.0)
                self._until_back(min(left_over, PATIENCE), None)
        return found

    # ---- HTTP --------------------------------------------------------------------------------------------

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self._bytes(method, path, body))

    def _bytes(self, method: str, path: str, body: Any = None) -> bytes:
        with self._open(method, path, body) as answer:
            found: bytes = answer.read()
            return found

    def _open(self, method: str, path: str, body: Any = None, last: int = 0) -> Any:
        headers = {"Accept": "*/*"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if last:
            headers["Last-Event-ID"] = str(last)
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body, allow_nan=False).encode(), "application/json"
        request = urllib.request.Request(self.server + path, data=data, headers=headers, method=method)
        try:
            return self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            raise _refused(error) from None
        except urllib.error.URLError as error:
            told = f"{self.server} cannot be reached ({error.reason}); is `weft serve` running?"
            raise UnreachableError(told) from None


def _why(task: dict[str, Any], reasons: dict[str, str]) -> str:
    if task["state"] not in ("queued", "planned"):
        return ""
    return reasons.get(task["id"], "waits to be planned" if task["state"] == "queued" else "")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token is for one server: nobody is followed elsewhere with it."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _refused(error: urllib.error.HTTPError) -> WeftError:
    message = f"HTTP {error.code}"
    with error, suppress(ValueError, KeyError, TypeError, OSError):
        message = str(json.loads(error.read(1 << 16))["error"])
    return InputError(message) if error.code < 500 else ServerError(message)


def _token(given: str | os.PathLike[str] | None) -> str:
    """The token itself: of a file, the last word of its first line."""
    if not given:
        return ""
    text = os.fspath(given)
    if os.sep in text or Path(text).is_file():
        try:
            lines = Path(text).expanduser().read_text(encoding="utf-8").split("\n")
            text = next(line.split()[-1] for line in lines if line.strip() and not line.startswith("#"))
        except (OSError, UnicodeDecodeError, StopIteration) as error:
            raise InputError(f"token file {os.fspath(given)}: cannot be read ({error})") from None
    return text.strip()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _quoted(task: str) -> str:
    return urllib.parse.quote(task, safe="")


def _safe_name(task: str) -> str:
    if not task.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"task {task!r} is no id")
    return task
