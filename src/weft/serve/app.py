"""The HTTP app: FastAPI over the queue. Needs the extra ``serve``; nothing else of Weft imports this module.

Bodies are read here rather than by FastAPI, so that size and depth are bounded before anything is parsed. Every mistake
in a request is a 4xx with one sentence: ``{"error": "..."}``.
"""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from weft.core.errors import InputError, WeftError
from weft.core.run_options import options_of
from weft.core.version import __version__
from weft.serve.options import ServeOptions
from weft.serve.queue_db import QueueError
from weft.serve.service import CONTENT_TYPE, EventFeed, GroupCommit, QueueService, ResidentModels
from weft.serve.submissions import MOST_BYTES, OPERATOR, BadRequestError, Tokens, read_prediction
from weft.serve.supervisor import Supervisor

T = TypeVar("T")
KEEP_ALIVE_SECONDS = 15.0
LAST_EVENT: str = Header("", alias="Last-Event-ID", description="The last event that was seen; before since.")
SHORT_BYTES = 1 << 14  # a body up to which what it asks for is checked in the thread that writes: within 20 ms
MOST_BODY_BYTES = 64 << 20  # of all bodies that are being read
MOST_REPORTS = 4  # of one user that wait: a server makes one after another
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
WITHOUT_TOKEN = ("/", "/health")  # the page has no data of its own and asks for a token; monitors have none
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "The request cannot be used; the answer says why.",
        401: "No token, or a wrong one.",
        403: "The task belongs to another user, is submitted for one, or the request is from a page of another site.",
        404: "There is no such task.",
        409: "Not in the task's present state.",
        410: "The file is no longer there.",
        413: "The body, or the settings of a task, are too large.",
        415: "The body is not application/json.",
        422: "A parameter is not of its type.",
        429: "The user's quota, or number of reports at once, is used up.",
        503: "The queue cannot be read or written now, or too many large bodies arrive at once; try again.",
    }.items()
}
DOWNLOADS = {  # by the last part of the path: file, how the name ends that a browser gives to it, summary
    "result": ("result.json", "", "Settings, metrics and history of a task that is done, or diverged"),
    "weights": ("model.safetensors", ".safetensors", "The best weights, as safetensors"),
    "kept": ("kept.safetensors", ".kept.safetensors", "What a module keeps besides its weights, as safetensors"),
    "top": ("top.safetensors", ".top.safetensors", "The weights of the best epochs, by rank, as safetensors"),
    "predictions": ("predictions.safetensors", ".safetensors", "Nodes and logits of an inference task, as safetensors"),
}
BEARER = HTTPBearer(scheme_name="token", description="A token of the server.", auto_error=False)  # _Gate looks at it
SUBMISSION = {
    "type": "object",
    "properties": {
        "task": {"type": "object", "description": "Settings of one task, as weft.Task takes them."},
        "tasks": {"type": "array", "items": {"type": "object"}, "description": "Several tasks: all or none."},
        "sweep": {
            "type": "object",
            "description": "The sweep that the tasks are of, as weft.Sweep.to_dict() gives it.",
        },
        "infer": {
            "type": "object",
            "description": "An inference task: of (the task whose weights to use) or weights (a file, with task).",
            "properties": {
                "of": {"type": "string"},
                "weights": {"type": "string"},
                "graph": {"type": "string", "description": "Another graph than the one trained on."},
                "nodes": {"description": "all, train, val, test, or a list of node ids."},
                "latency_target": {"type": "number", "description": "Seconds from submission to answer."},
                "resident": {"type": "boolean", "description": "Stay loaded for /api/predict."},
            },
        },
        "key": {"type": "string", "description": "Queues the same tasks only once; others are refused."},
        "priority": {"type": "integer", "description": "Of a user at most the server's --max-priority."},
        "time_limit": {"type": "number", "description": "Seconds that each task may run in all."},
        "after": {"type": "array", "items": {"type": "string"}, "description": "Tasks that must be done before."},
        "deadline": {"type": "number", "description": "Seconds since 1970."},
        "max_attempts": {"type": "integer"},
        "user": {"type": "string", "description": "Whom it is for: of the operator, or on a server without tokens."},
    },
}
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
for _row in options_of("queue"):  # how tasks are trained, as weft.RunOptions takes it
    _rule, _kind = _row.metadata["rule"], {"type": JSON_TYPES[_row.metadata["rule"].kind]}
    SUBMISSION["properties"][_row.name] = {
        **({} if _rule.parse is not None else _kind),
        "description": _row.metadata["shell"]["help"],
    }
PREDICTION = {
    "type": "object",
    "required": ["task", "nodes"],
    "properties": {
        "task": {"type": "string", "description": "A task that is done, or a resident inference task."},
        "nodes": {"type": "array", "items": {"type": "integer"}, "description": "Up to 10,000 node ids."},
        "fanout": {"type": "array", "description": "Sampled neighbours per hop; all unless given."},
        "seed": {"type": "integer", "description": "Of the samples."},
        "latency_target": SUBMISSION["properties"]["infer"]["properties"]["latency_target"],  # type: ignore[index]
    },
}


def make_app(options: ServeOptions, supervisor: Supervisor, tokens: Tokens) -> FastAPI:
    """The app over ``supervisor``'s queue, for those that ``tokens`` lets in."""
    service = QueueService(options, supervisor)
    answers: Counter[int] = Counter()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    api = APIRouter(responses=ERRORS, dependencies=[] if tokens.open else [Depends(BEARER)])
    app = FastAPI(
        title="Weft",
        version=__version__,
        description="A queue of trainings that share devices.",
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from another host
        redoc_url=None,
    )
    app.state.service, app.state.bodies = service, Counter()
    for kind in (RequestValidationError, HTTPException, WeftError, sqlite3.Error):
        app.add_exception_handler(kind, _refused)
    app.add_middleware(_Gate, tokens=tokens, answers=answers)
    _add_changes(api, service)
    _add_reading(api, service, answers)
    app.include_router(api)
    page = files("weft.serve").joinpath("static", "dashboard.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def dashboard() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

    stopped: dict[int | str, dict[str, Any]] = {503: {"description": "The queue is not being worked on."}}

    @app.get("/health", summary="Whether the queue is being worked on", responses=stopped)
    async def health() -> Response:
        trouble = service.trouble()
        return JSONResponse({"status": trouble or "working"}, status_code=503 if trouble else 200)

    app.state.routes = [*api.routes, *(route for route in app.routes if isinstance(route, Route))]
    return app


# ---- errors and access -----------------------------------------------------------------------------------


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)


async def _refused(request: Request, error: Any) -> Response:
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return _error(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    if isinstance(error, HTTPException):
        answer = _error(error.status_code, str(error.detail))
        if error.status_code == 405:  # Starlette names the methods of one route, and a path may have several
            there = (route for route in request.app.state.routes if route.matches(request.scope)[0] != Match.NONE)
            answer.headers["Allow"] = ", ".join(sorted({method for route in there for method in route.methods}))
        return answer
    if isinstance(error, BadRequestError):
        return _error(error.status, str(error))
    if isinstance(error, sqlite3.Error):
        return _error(503, f"the queue cannot be read now ({error}); try again, or tell the operator")
    status = 409 if isinstance(error, QueueError) else 400 if isinstance(error, InputError) else 503
    return _error(status, str(error))


class _Gate:
    """Lets in whom ``tokens`` knows, counts the answers, and adds headers to all of them."""

    def __init__(self, app: ASGIApp, tokens: Tokens, answers: Counter[int]) -> None:
        self._app, self._tokens, self._answers = app, tokens, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers[message["status"]] += 1
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["X-Frame-Options"] = "DENY"
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = _refusal(Request(scope), self._tokens)
        await (self._app if refusal is None else refusal)(scope, receive, answered)


def _refusal(request: Request, tokens: Tokens) -> Response | None:
    """Why a request is not let in, as an answer; notes who it is from otherwise."""
    if tokens.open:
        host = request.headers.get("host", "")
        if LOOPBACK.fullmatch(host) is None:
            return _error(400, "a server without tokens answers to localhost only")  # another name may be a trap
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        other_page = site not in ("none", "same-origin") or (origin is not None and urlsplit(origin).netloc != host)
        if request.method not in ("GET", "HEAD") and other_page:  # a browser sends these headers, and no page sets them
            return _error(403, "a server without tokens takes no changes from pages of other sites; use its own page")
        request.state.user = OPERATOR
        return None
    if request.url.path in WITHOUT_TOKEN:
        return None
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    user = tokens.user_of(token.strip()) if kind.lower() == "bearer" and token.strip() else None
    if user is None:
        what = "this token is not known here" if token.strip() else "a token is needed"
        how = "give --token FILE or set WEFT_TOKEN (over HTTP: the header 'Authorization: Bearer TOKEN')"
        refusal = _error(401, f"{what}; {how}")
        refusal.headers["WWW-Authenticate"] = "Bearer"
        return refusal
    request.state.user = user
    return None


async def _body(request: Request) -> bytes:
    """The body of a request, which says that it is JSON; bounded while it is read, as are all bodies together."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BadRequestError("send the body as application/json", 415)  # which no form of another page can
    body, held = bytearray(), request.app.state.bodies
    try:
        async for chunk in request.stream():
            body += chunk
            held["bytes"] += len(chunk)
            if len(body) > MOST_BYTES:
                raise BadRequestError(f"the body is larger than {MOST_BYTES:,} bytes", 413)
            if held["bytes"] > MOST_BODY_BYTES:
                raise BadRequestError("too many large requests arrive at once; try again", 503)
    finally:
        held["bytes"] -= len(body)
    return bytes(body)


def _user(request: Request) -> str:
    return request.state.user


async def _in(pool: Any, call: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, partial(call, *arguments))


# ---- changing the queue --------------------------------------------------------------------------------------


def _add_changes(api: APIRouter, service: QueueService) -> None:
    commits = GroupCommit(service.writes, service.submit_together)
    residents = ResidentModels(service, commits.put)

    def accepts(schema: dict[str, Any]) -> dict[str, Any]:
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

    @api.post("/api/predict", summary="Predict for some nodes at once", openapi_extra=accepts(PREDICTION))
    async def predict(request: Request, user: str = Depends(_user)) -> Response:
        body = await _body(request)
        asked = read_prediction(body) if len(body) <= SHORT_BYTES else await _in(None, read_prediction, body)
        answer = await residents.predict(asked, user)
        return Response(json.dumps(answer), media_type="application/json")

    @api.post("/api/tasks", status_code=201, summary="Submit tasks", openapi_extra=accepts(SUBMISSION))
    async def submit(request: Request, user: str = Depends(_user)) -> Response:
        body: Any = await _body(request)
        if len(body) > SHORT_BYTES:  # 10,000 tasks are checked in a second: not by the one thread that writes
            body = await _in(None, service.read, body, user)
        tasks = await commits.put((body, user))
        return Response(await _in(service.reads, service.submitted, tasks), 201, media_type="application/json")

    def changing(call: Callable[..., dict[str, Any]], action: str) -> Callable[..., Any]:
        async def change(name: str, user: str = Depends(_user)) -> dict[str, Any]:
            return await _in(service.writes, call, action, name, user)

        return change

    for action, what in (("cancel", ""), ("pause", ""), ("resume", "paused ")):
        one, all_of_it = f"{action.capitalize()} a {what}task", f"{action.capitalize()} the {what}tasks of a sweep"
        api.post(f"/api/tasks/{{name}}/{action}", summary=one, name=action)(changing(service.change, action))
        api.post(f"/api/sweeps/{{name}}/{action}", summary=all_of_it, name=f"{action} sweep")(
            changing(service.change_sweep, action)
        )


# ---- reading it -----------------------------------------------------------------------------------------------


def _add_reading(api: APIRouter, service: QueueService, answers: Counter[int]) -> None:
    @api.get("/api/tasks", summary="List tasks")
    async def listed(
        state: str | None = None,
        user: str | None = None,
        sweep: str | None = None,
        limit: int = 1000,
        beyond: int = 0,
    ) -> Response:
        text = await _in(service.reads, service.page, state, user, limit, beyond, sweep)
        return Response(text, media_type="application/json")

    @api.get("/api/sweeps", summary="List sweeps")
    async def sweeps(user: str | None = None, limit: int = 1000, beyond: int = 0) -> Response:
        return await _json(service.reads, service.sweeps, user, limit, beyond)

    @api.get("/api/sweeps/{sweep}", summary="Show a sweep")
    async def show_sweep(sweep: str) -> Response:
        return await _json(service.reads, service.sweep, sweep)

    making: Counter[str] = Counter()  # reports, by user

    async def report(make: Callable[[str], str], name: str, user: str) -> Response:
        if making[user] >= MOST_REPORTS:  # others would wait for them
            raise BadRequestError(f"{MOST_REPORTS} reports for you are being made; ask again when one is there", 429)
        making[user] += 1
        try:
            page = await _in(service.reports, make, name)
        finally:
            making[user] -= 1
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

    @api.get("/api/sweeps/{sweep}/report", summary="The report of a sweep as it stands", response_class=HTMLResponse)
    async def report_sweep(sweep: str, user: str = Depends(_user)) -> Response:
        return await report(service.report_sweep, sweep, user)

    @api.get("/api/tasks/{task}/report", summary="The report of a task that is done", response_class=HTMLResponse)
    async def report_task(task: str, user: str = Depends(_user)) -> Response:
        return await report(service.report_task, task, user)

    @api.get("/api/tasks/{task}", summary="Show a task")
    async def show(task: str) -> Response:
        return await _json(service.reads, service.show, task)

    @api.get("/api/tasks/{task}/logs", summary="What a task printed, and its notes", response_class=PlainTextResponse)
    async def logs(task: str) -> Response:
        return PlainTextResponse(await _in(service.reads, service.log, task))

    @api.get("/api/tasks/{task}/curve", summary="The learning curve of a task")
    async def curve(task: str) -> Response:
        return await _json(service.reads, service.curve, task)

    def downloading(name: str, kind: str, ending: str) -> Callable[..., Any]:
        async def download(task: str) -> Response:
            if name == "result.json":
                return Response(await _in(service.reads, service.result, task), media_type=kind)
            path = await _in(service.reads, service.file, task, name)
            return FileResponse(path, media_type=kind, filename=f"{task}{ending}" if ending else None)

        return download

    for what, (name, ending, summary) in DOWNLOADS.items():
        kind = "application/octet-stream" if ending else "application/json"
        add = api.get(f"/api/tasks/{{task}}/{what}", summary=summary, name=what, **_answers_with(kind))
        add(downloading(name, kind, ending))

    @api.get("/api/state", summary="Devices, workers, groups and figures")
    async def state(user: str = Depends(_user)) -> Response:
        return await _json(service.reads, service.state, user)

    feed = EventFeed(service)

    @api.get("/api/events", summary="Events as they happen (server-sent events)", **_answers_with("text/event-stream"))
    async def events(
        request: Request, since: int | None = None, task: str | None = None, last: str = LAST_EVENT
    ) -> Response:
        if last := last.strip():  # of a stream that was cut off
            if not (last.isascii() and last.isdigit()) or len(last) > 18:
                raise BadRequestError(f"Last-Event-ID={last[:40]!r} must be a sequence number")
            since = int(last)
        elif since is not None and not 0 <= since < 2**62:
            raise BadRequestError(f"since={since} must be a sequence number, 0 or more")
        first = since or 0
        return StreamingResponse(_stream(request, service, feed, first, task), media_type="text/event-stream")

    @api.get("/metrics", summary="Figures for Prometheus", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(await _in(service.reads, service.metrics, answers), media_type=CONTENT_TYPE)


def _answers_with(kind: str) -> dict[str, Any]:
    """What describes an operation whose answer is of another type than JSON."""
    return {"response_class": Response, "responses": {200: {"content": {kind: {}}}}}


async def _json(pool: Any, call: Callable[..., Any], *arguments: Any) -> Response:
    """Answer with plain data; the encoder of FastAPI would go through 10,000 tasks once more."""
    text = await _in(pool, lambda: json.dumps(call(*arguments), allow_nan=False).encode())
    return Response(text, media_type="application/json")


async def _stream(
    request: Request, service: QueueService, feed: EventFeed, since: int, task: str | None
) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    last = time.monotonic()
    while service.supervisor.is_alive() and not await request.is_disconnected():
        try:
            since, text = await feed.after(since, task)
        except (sqlite3.Error, WeftError):
            return  # who follows comes again
        if text or time.monotonic() - last > KEEP_ALIVE_SECONDS:
            last = time.monotonic()
            yield text or b": still here\n\n"


# ---- Bounded connections.
#
# Half of the files that the process may open stay free for the queue and the workers. If all connections are in use,
# the one that has waited longest without a whole request is closed, so that a client that sends one is answered.

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

REQUEST_SECONDS = 20.0  # from the first byte of a request, or from the connection on, to its last byte
MOST_CONNECTIONS = 1_000
MOST_WAITING = 128  # that are accepted at once, before any of them is counted


def most_connections() -> int:
    """How many connections there may be now."""
    if resource is None:
        return MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(8, min(MOST_CONNECTIONS, files // 2))


class BoundedConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that is closed if its request does not come, or if it is in the way of others that come."""

    _deadline: asyncio.TimerHandle | None = None
    _since = 0.0
    _ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Take part, or be closed at once where every other connection has a request."""
        present = [connection for connection in self.connections if not connection._ended]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self.end)
        if len(present) >= most_connections():
            waiting = [connection for connection in present if not connection.has_request]
            min(waiting, key=lambda connection: connection._since, default=self).end()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        if self.has_request:
            self._stop_waiting()
        elif self._deadline is None and not self._ended:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self.end)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def has_request(self) -> bool:
        """Whether a whole request has come that is not answered yet."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def end(self) -> None:
        """Close it at once."""
        self._ended = True
        self._stop_waiting()
        self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
