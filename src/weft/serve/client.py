"""Client: a queue server from Python, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import operator
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from weft.core.errors import InputError, WeftError
from weft.core.run_options import Placement, RunOptions, refuse_misplaced
from weft.core.sweep import Sweep, tasks_in
from weft.core.task import Task
from weft.core.wording import option
from weft.serve.queue_db import ENDED
from weft.serve.submissions import (
    LARGEST_NODE,
    MOST_SETTINGS_BYTES,
    OPTION_RULES,
    check_option,
    given_settings,
    is_loopback,
)

if TYPE_CHECKING:
    from weft.engine.sweep_result import SweepResult

# ---- What a user gives to the client, checked before anything is sent: ids, numbers, nodes, work, address and token.

AN_ID = re.compile(r"[0-9a-f]{1,64}")
SHOWN = 80  # characters of a value in a message
DEFAULT_SERVER = "http://127.0.0.1:8787"

TaskId = str | Mapping[str, Any]
Named = Union[TaskId, "SubmittedSweep"]  # a task, or a sweep

A_SWEEP = re.compile(r"[\w=.+-]{1,100}-[0-9]{1,18}", re.ASCII)  # which no id of a task is


def is_sweep(name: object) -> bool:
    """Whether ``name`` is that of a sweep rather than a task."""
    return isinstance(name, SubmittedSweep) or (isinstance(name, str) and A_SWEEP.fullmatch(name) is not None)


def path_of(task: Named) -> str:
    """The path of a task, or of a sweep by its name, in the server's HTTP interface."""
    if is_sweep(task):
        return f"/api/sweeps/{task.name if isinstance(task, SubmittedSweep) else task}"
    return f"/api/tasks/{task_id(task)}"


def task_id(task: TaskId) -> str:
    """The id of a task, given as such or as the task that the server showed."""
    name = task.get("id") if isinstance(task, Mapping) else task
    if not isinstance(name, str):
        what = "a dict without an id" if isinstance(task, Mapping) else _kind(task)
        raise InputError(f"expected the id of a task, or a task as submit returns it, not {what}")
    if is_sweep(name):
        raise InputError(f"{name[:SHOWN]} is a sweep; give one of its tasks: weft queue list --sweep {name[:SHOWN]}")
    if not AN_ID.fullmatch(name):
        raise InputError(f"there is no task {name[:SHOWN]!r}; ids are hexadecimal, such as 3f2a9c41d0be")
    return name


def task_ids(tasks: TaskId | Iterable[TaskId] | None) -> list[str]:
    """The ids of several tasks; one task is a list of one."""
    if tasks is None:
        return []
    if isinstance(tasks, (str, Mapping)):
        return [task_id(tasks)]
    if not isinstance(tasks, Iterable):
        raise InputError(f"expected ids of tasks, not {_kind(tasks)}")
    return [task_id(task) for task in tasks]


def _kind(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_nodes(nodes: str | Sequence[int] | None) -> str | list[int] | None:
    """The name of a split, or ids of nodes as plain numbers."""
    if nodes is None or isinstance(nodes, str):
        return nodes
    expected = "expected all, train, val, test, or ids such as [3, 5, 8]"
    if not isinstance(nodes, Iterable) or isinstance(nodes, (bytes, Mapping)):
        raise InputError(f"{option('nodes', nodes)}: {expected}")
    ids = []
    for node in nodes:
        try:  # numbers of numpy and torch are whole numbers, too
            index = -1 if isinstance(node, bool) else operator.index(node)
        except TypeError:
            index = -1
        if not 0 <= index <= LARGEST_NODE:
            raise InputError(f"nodes: {str(node)[:SHOWN]!r} is no id of a node; {expected}")
        ids.append(index)
    return ids


def check_server(server: str) -> str:
    """The host of a server's address."""
    expected = f"server {str(server)[:SHOWN]!r}: expected an address such as {DEFAULT_SERVER}"
    if not isinstance(server, str) or not server.isprintable() or " " in server:
        raise InputError(expected)
    try:
        parts = urllib.parse.urlsplit(server)
        host, _ = parts.hostname, parts.port
    except ValueError as error:  # what stands for the port, or an open bracket
        raise InputError(f"{expected} ({error})") from None
    if parts.scheme not in ("http", "https") or not host:
        raise InputError(expected)
    return host


def read_token(given: str | os.PathLike[str] | None) -> str:
    """The token itself: of a file, the last word of its first line. Messages do not show it."""
    if given is None or given == "":
        return ""
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise InputError(f"token: expected the token or the path of a file with one, not {_kind(given)}")
    if "\n" not in text.strip() and (os.sep in text or os.path.isfile(text)):
        what = f"token file {text}"
        try:
            lines = Path(text).expanduser().read_text(encoding="utf-8").split("\n")
            token = next(line.split()[-1] for line in lines if line.strip() and not line.startswith("#"))
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"{what}: cannot be read ({error})") from None
        except StopIteration:
            raise InputError(f"{what}: has no token; `weft serve` writes one") from None
    else:
        token, what = text.strip(), "token"
    # A header of HTTP has to hold it.
    if any(character.isspace() or not character.isprintable() or ord(character) > 255 for character in token):
        raise InputError(f"{what}: has characters that no token has; it is one word of letters, digits, - and _")
    return token


PATIENCE, RETRY_SECONDS = 300.0, 0.5  # how long a server that is away is waited for, and between two attempts
REPORT_SECONDS = 600.0  # that a report may take, since a server makes one after another
SERVER_VARIABLE, TOKEN_VARIABLE = "WEFT_SERVER", "WEFT_TOKEN"


class ServerError(WeftError):
    """The server could not be reached, or something is wrong with it."""


class UnreachableError(ServerError):
    """Nothing answers at the address: the server has ended, is being started again, or was never there."""


class SubmittedSweep(list[dict[str, Any]]):
    """The tasks of a sweep in the queue, as the server showed them last, and its ``name`` there.

    Every method of :class:`Client` that takes a task takes it, or its name, for all of its tasks.
    """

    def __init__(self, client: Client, name: str, tasks: Iterable[dict[str, Any]]) -> None:
        super().__init__(tasks)
        self.client, self.name = client, name

    def wait(self, seconds: float | None = None) -> SubmittedSweep:
        """Return once all tasks have ended."""
        return SubmittedSweep(self.client, self.name, self.client.wait(self, seconds))

    def result(self, folder: str | os.PathLike[str]) -> SweepResult:
        """The outcome of a sweep whose tasks have ended, as :func:`weft.run` returns it; downloads to ``folder``."""
        from weft.engine.loading import read_result  # imports torch, which a client does without

        result: Any = read_result(self.client.fetch(self, folder))
        return result


class Client:
    """The queue at ``server`` (``$WEFT_SERVER``, else ``http://127.0.0.1:8787``).

    ``token``: the token itself, or the path of a file with one (``$WEFT_TOKEN``); None on a server that needs none.
    A task is given by its id, or as the dict that :meth:`submit` and :meth:`tasks` return; a sweep by its name, or as
    the :class:`SubmittedSweep` that :meth:`submit` returns.

    >>> client = weft.Client()
    >>> sweep = client.submit(weft.Sweep("demo", model="gcn", seed=range(4)))
    >>> sweep.wait()
    >>> result = sweep.result("results")
    """

    def __init__(self, server: str | None = None, token: str | os.PathLike[str] | None = None, timeout: float = 30.0):
        address = server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
        host = check_server(address)
        self.server = address.rstrip("/")
        self._token = read_token(token if token is not None else os.environ.get(TOKEN_VARIABLE))
        self._timeout = timeout
        handlers: list[Any] = [_NoRedirect()]
        if is_loopback(host):
            handlers.append(urllib.request.ProxyHandler({}))  # a proxy is of no use for this machine
        self._opener = urllib.request.build_opener(*handlers)

    # ---- changing ----------------------------------------------------------------------------------------

    def submit(
        self,
        work: Task | Sweep | Sequence[Task],
        *,
        key: str | None = None,
        priority: int = 0,
        after: Named | Sequence[Named] = (),
        budget: str | int | None = None,
        deadline: float | None = None,
        time_limit: float | None = None,
        user: str | None = None,
        ranks: int = 1,
        placement: Placement = Placement(),  # noqa: B008
        options: RunOptions = RunOptions(),  # noqa: B008
        **misplaced: Any,
    ) -> list[dict[str, Any]]:
        """Queue a task, or every task of a sweep, all or none; returns them as the server shows them.

        ``key``: the same key queues the same work only once, so a submission can be repeated safely. ``after``:
        tasks, or sweeps, that must be done before. ``deadline``: seconds since 1970. ``time_limit``: seconds that each
        task may run in all, after which it is ended. ``budget`` (bytes that each task may take), ``ranks``,
        ``placement`` and ``options`` are those of :func:`weft.run`.
        """
        if not isinstance(options, RunOptions):
            raise InputError(f"options={options!r} must be a weft.RunOptions(...)")
        refuse_misplaced(misplaced, "submit")
        tasks = tasks_in(work, "submit")
        options = options.with_keywords(budget=budget, ranks=ranks, placement=placement)
        plain = options.for_queue
        options.check_tasks(tasks)
        body: dict[str, Any] = {"tasks": [given_settings(task) for task in tasks], "after": self._ids(after), **plain}
        if isinstance(work, Sweep):
            described = work.to_dict()  # of one with many explicit tasks its name alone
            body["sweep"] = described if len(json.dumps(described)) < MOST_SETTINGS_BYTES else {"name": work.name}
        body |= _checked(priority=priority, key=key, user=user, deadline=deadline, time_limit=time_limit)
        queued = self._json("POST", "/api/tasks", body)["tasks"]
        sweep = queued[0].get("sweep")
        return SubmittedSweep(self, sweep, queued) if sweep else queued

    def infer(
        self,
        of: TaskId | None = None,
        *,
        task: Task | None = None,
        weights: str | None = None,
        nodes: str | Sequence[int] | None = None,
        graph: str | None = None,
        latency_target: float | None = None,
        key: str | None = None,
        priority: int = 0,
        after: Named | Sequence[Named] = (),
        user: str | None = None,
    ) -> dict[str, Any]:
        """Queue an inference task: the logits of a trained model, which :meth:`fetch` downloads.

        ``of``: the task whose best weights to use, once it is done; or ``task``, settings, with ``weights``, a
        safetensors file in the server's folder of graphs. ``nodes``: ``"test"`` or another split, ids, or None for
        all. ``graph``: another one than the model was trained on. ``latency_target``: seconds from now to the answer,
        by which the scheduler gives it precedence over trainings.
        """
        asked: dict[str, Any] = {"of": None if of is None else task_id(of), "weights": weights, "graph": graph}
        asked |= {"nodes": check_nodes(nodes), "latency_target": check_option("latency_target", latency_target)}
        infer = {name: value for name, value in asked.items() if value is not None}
        body: dict[str, Any] = {"infer": infer, "after": self._ids(after)}
        if task is not None:
            if not isinstance(task, Task):
                raise InputError(f"task: expected a weft.Task, not {_kind(task)}")
            body["task"] = given_settings(task)
        body |= _checked(priority=priority, key=key, user=user)
        return self._json("POST", "/api/tasks", body)["tasks"][0]

    def predict(
        self,
        task: TaskId,
        nodes: Sequence[int],
        *,
        fanout: Sequence[Any] | None = None,
        seed: int | None = None,
        latency_target: float | None = None,
    ) -> dict[str, Any]:
        """What the model of ``task``, which is done, says of up to 10,000 ``nodes``, at once.

        ``logits`` [M, C], and of classes ``classes`` [M] and ``probabilities`` [M, C]. The first request loads it, with
        precedence over trainings by ``latency_target``. ``fanout``: from sampled neighbours, drawn by ``seed``.
        """
        asked = {"task": task_id(task), "nodes": check_nodes(nodes), "fanout": fanout, "seed": seed}
        asked["latency_target"] = check_option("latency_target", latency_target)
        body = {name: value for name, value in asked.items() if value is not None}
        return self._json("POST", "/api/predict", body)

    def cancel(self, task: Named) -> dict[str, Any]:
        """Cancel a task, or all of a sweep that have not ended (``changed``: how many)."""
        return self._json("POST", f"{path_of(task)}/cancel", {})

    def pause(self, task: Named) -> dict[str, Any]:
        """Keep a task, or all of a sweep, from running until it is resumed; a running one saves a checkpoint first."""
        return self._json("POST", f"{path_of(task)}/pause", {})

    def resume(self, task: Named) -> dict[str, Any]:
        """Queue a paused task, or the paused tasks of a sweep, again."""
        return self._json("POST", f"{path_of(task)}/resume", {})

    # ---- reading -----------------------------------------------------------------------------------------

    def tasks(
        self, state: str | None = None, user: str | None = None, sweep: str | None = None
    ) -> list[dict[str, Any]]:
        """All tasks in order of submission, or those of a state, a user or a sweep."""
        found: list[dict[str, Any]] = []
        for page in self._pages("/api/tasks", state=state, user=user, sweep=sweep):
            waits = ("queued", "planned")  # the reasons are of the moment before, or after
            reasons = {task["id"]: page["why"].get(task["id"]) for task in page["tasks"] if task["state"] in waits}
            found += [{**task, "why": reasons.get(task["id"]) or task["why"]} for task in page["tasks"]]
        return found

    def sweeps(self, user: str | None = None) -> list[dict[str, Any]]:
        """All sweeps in order of submission, or those of a user; ``counts``: how many tasks are in which state."""
        return [sweep for page in self._pages("/api/sweeps", user=user) for sweep in page["sweeps"]]

    def _pages(self, path: str, **asked: Any) -> Iterator[dict[str, Any]]:
        beyond: int | None = 0
        while beyond is not None:
            wanted = {name: value for name, value in asked.items() if value is not None}
            query = urllib.parse.urlencode({**wanted, "limit": 5000, "beyond": beyond})
            page = self._json("GET", f"{path}?{query}")
            yield page
            beyond = page["next"]

    def show(self, task: Named) -> dict[str, Any]:
        """One task with its estimate, why it waits, and its result; or a sweep with its settings and its best task."""
        return self._json("GET", path_of(task))

    def report(self, task: Named) -> str:
        """The report of a sweep as it stands, or of a task that is done: an HTML page."""
        return self._bytes("GET", f"{path_of(task)}/report", seconds=REPORT_SECONDS).decode("utf-8")

    def logs(self, task: TaskId) -> str:
        """What a task printed, and the notes of its run."""
        return self._bytes("GET", f"/api/tasks/{task_id(task)}/logs").decode("utf-8", "replace")

    def state(self) -> dict[str, Any]:
        """Devices, workers, running groups, and how many tasks are in which state."""
        return self._json("GET", "/api/state")

    def result(self, task: TaskId) -> dict[str, Any]:
        """Settings, metrics and history of a task that is done, or diverged: what is in its ``result.json``."""
        return self._json("GET", f"/api/tasks/{task_id(task)}/result")

    def fetch(self, task: Named, folder: str | os.PathLike[str]) -> Path:
        """Download the files of a task that is done, or of a sweep that has ended, into ``folder/TASK``: its folder.

        Of a sweep it is what a run of it leaves, less its checkpoints.

        Of a task whose loss became NaN they have the best weights from before, and ``"status": "diverged"``.
        They are ``result.json``, and ``model.safetensors`` of a training or ``predictions.safetensors`` of an inference
        task: its ``nodes`` [R] and their ``logits`` [R, C]. ``kept.safetensors``: what a user's module keeps beside its
        weights, if it does. ``top.safetensors``: the weights of its best epochs, with ``keep_top``.
        """
        name = path_of(task).rpartition("/")[2]
        try:
            target = Path(folder) / name
        except TypeError:
            raise InputError(f"folder: expected the path of a folder, not {_kind(folder)}") from None
        if not is_sweep(task):
            self._fetch_files(self.show(name), target)
            return target
        tasks = self.tasks(sweep=name)
        description = {**self.show(name), "members": tasks}
        unfinished = sum(task["state"] not in ENDED for task in tasks)
        if unfinished:
            state = f"sweep {name!r}: {unfinished} of its {len(tasks)} tasks have not ended"
            raise InputError(f"{state}; wait for it (weft watch {name}), cancel them, or fetch single tasks")
        from weft.serve.sweep_result import member_folders, write_sweep  # imports torch

        folders = member_folders(target, description)
        for member, inside in zip(tasks, folders, strict=True):
            if member["state"] == "done" or member["score"] is not None:  # or it diverged after a usable epoch
                self._fetch_files(member, inside)
        write_sweep(target, description, folders)
        return target

    def _fetch_files(self, task: Mapping[str, Any], place: Path) -> None:
        inferred = task["kind"] == "inference"
        other = ("predictions.safetensors", "predictions") if inferred else ("model.safetensors", "weights")
        others = ("kept", "top") if not inferred else ()
        kept = [(f"{kind}.safetensors", kind) for kind in others if kind in self.result(task)]
        try:
            place.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise InputError(f"{place.parent}: is a file, or in one; give a folder to download to") from None
        except (OSError, ValueError) as error:
            told = getattr(error, "strerror", None) or error
            raise InputError(f"{place}: cannot be made ({told}); give another folder") from None
        for name, kind in (("result.json", "result"), other, *kept):
            partial = place / f".{name}.partial"  # the file is there as a whole or not at all
            with self._open("GET", f"/api/tasks/{task_id(task)}/{kind}") as answer:
                try:
                    file = open(partial, "wb")  # noqa: SIM115
                except OSError as error:
                    told = f"{place}: cannot be written to ({error.strerror}); give another folder"
                    raise InputError(told) from None
                try:
                    with file:
                        shutil.copyfileobj(answer, file, 1 << 20)
                except (OSError, http.client.HTTPException) as error:
                    raise InputError(f"{place / name}: is not here as a whole ({error}); fetch it again") from None
            os.replace(partial, place / name)

    def events(
        self,
        since: int = 0,
        task: TaskId | None = None,
        patience: float = PATIENCE,
        on_lost: Callable[[str], None] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Events after the sequence number ``since``, as they happen.

        Where a connection was lost, as when the server is started again, it goes on after the last event that was
        seen; an error once the server was away for ``patience`` seconds. ``on_lost`` is told that it waits.
        """
        query = "" if task is None else "?" + urllib.parse.urlencode({"task": task_id(task)})
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
            except UnreachableError as error:
                if time.monotonic() > until:
                    words = f"{self.server} was lost and did not come back within {patience:.0f} s"
                    raise UnreachableError(f"{words}; its tasks go on where they were once it is started") from error
            if not told and on_lost is not None:
                on_lost(f"the connection to {self.server} was lost; waiting up to {patience:.0f} s for it to come back")
            told = True

    def wait(self, tasks: Named | Sequence[TaskId], seconds: float | None = None) -> list[dict[str, Any]]:
        """Return once all of ``tasks`` (ids, or what :meth:`submit` returned), or of a sweep, have ended; the tasks."""
        sweep = path_of(tasks).rpartition("/")[2] if is_sweep(tasks) else None
        until = None if seconds is None else time.monotonic() + seconds
        states: list[dict[str, Any]] = [] if sweep else [{"id": name, "state": ""} for name in task_ids(tasks)]

        def unfinished() -> int:
            if sweep:  # how many are in which state, rather than all of its tasks
                return sum(count for state, count in self.show(sweep)["counts"].items() if state not in ENDED)
            states[:] = [task if task["state"] in ENDED else self.show(task["id"]) for task in states]
            return sum(task["state"] not in ENDED for task in states)

        left = unfinished()
        while left:
            if until is not None and time.monotonic() > until:
                raise ServerError(f"{left} tasks have not ended after {seconds:g} s")
            time.sleep(0.2)
            try:
                left = unfinished()
            except UnreachableError:
                left_over = PATIENCE if until is None else max(until - time.monotonic(), 0.0)
                self._until_back(min(left_over, PATIENCE), None)
        return self.tasks(sweep=sweep) if sweep else states

    def _ids(self, names: Named | Iterable[Named]) -> list[str]:
        """The ids of several tasks, and of all tasks of sweeps among them."""
        if isinstance(names, (str, Mapping)) or not isinstance(names, Iterable):
            return task_ids(self.tasks(sweep=str(names)) if is_sweep(names) else names)
        return [each for name in names for each in (self._ids(name) if is_sweep(name) else [task_id(name)])]

    # ---- HTTP --------------------------------------------------------------------------------------------

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self._bytes(method, path, body))

    def _bytes(self, method: str, path: str, body: Any = None, seconds: float = 0.0) -> bytes:
        with self._open(method, path, body, seconds=seconds) as answer:
            try:
                return answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> UnreachableError:
        reason = getattr(error, "reason", error)
        return UnreachableError(f"{self.server} cannot be reached ({reason}); is `weft serve` running?")

    def _open(self, method: str, path: str, body: Any = None, last: int = 0, seconds: float = 0.0) -> Any:
        headers = {"Accept": "*/*"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if last:
            headers["Last-Event-ID"] = str(last)
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            try:
                data = json.dumps(body, allow_nan=False).encode()
            except (TypeError, ValueError) as error:
                told = f"what was given cannot be sent as JSON ({error})"
                raise InputError(f"{told}; give text, finite numbers, lists and dicts of them") from None
        request = urllib.request.Request(self.server + path, data=data, headers=headers, method=method)
        try:
            return self._opener.open(request, timeout=max(self._timeout, seconds))
        except urllib.error.HTTPError as error:
            message = f"HTTP {error.code}"
            with error, suppress(ValueError, KeyError, TypeError, OSError):
                message = str(json.loads(error.read(1 << 16))["error"])
            refused = InputError(message) if error.code < 500 else ServerError(message)
            raise refused from None
        except (http.client.InvalidURL, UnicodeError) as error:
            raise InputError(f"server {self.server!r}: is no address that can be reached ({error})") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None


def _checked(**options: Any) -> dict[str, Any]:
    """The options of a submission that were given; a :class:`SpecError` for one that cannot be used."""
    checked = {name: check_option(name, value) if name in OPTION_RULES else value for name, value in options.items()}
    return {name: value for name, value in checked.items() if value is not None}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects, so that the token is not sent to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None
