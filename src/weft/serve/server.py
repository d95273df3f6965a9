"""``weft serve`` as a function: the supervisor in a thread, the HTTP app in front, and an orderly end."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from weft.core.errors import SpecError, WeftError
from weft.serve.http.tokens import Tokens, make_token_file
from weft.serve.options import ServeOptions
from weft.serve.supervisor import Supervisor

try:
    import fcntl
except ImportError:  # Windows: nobody is kept out
    fcntl = None  # type: ignore[assignment]


def parse_address(text: str) -> tuple[str, int]:
    """``127.0.0.1:8787`` or ``[::1]:8787`` as host and port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise SpecError(f"--bind {text}: expected HOST:PORT, such as 127.0.0.1:8787")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def find_tokens(db: Path, file: Path | None, no_auth: bool, host: str) -> tuple[Tokens, Path | None]:
    """The tokens to let in by, and the file they are in; without a file given, one is made beside the queue."""
    if no_auth:
        if file is not None:
            raise SpecError("--no-auth and --token: give one of them")
        if not is_loopback(host):
            raise SpecError(f"--no-auth with --bind {host}: others could reach it; bind to 127.0.0.1, or use tokens")
        return Tokens(open=True), None
    path = file if file is not None else db.with_name(db.name + ".token")
    if file is None:
        make_token_file(path)
    return Tokens.read(path), path


class ServerLock:
    """One server per queue file; the system lets go of it however the server ends."""

    def __init__(self, db: Path) -> None:
        self._path = db.with_name(db.name + ".lock")
        self._handle = -1

    def __enter__(self) -> ServerLock:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o644)
        if fcntl is not None:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._handle)
                raise SpecError(f"{self._path}: another server works on this queue; use that one") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def serve(options: ServeOptions, host: str, port: int, tokens: Tokens, drain_seconds: float = 60.0) -> None:
    """Serve until SIGTERM or Ctrl-C; then let running groups save their state, which the next server resumes from."""
    try:
        import uvicorn

        from weft.serve.http.app import make_app
    except ImportError as error:
        raise SpecError(f"weft serve needs {error.name!r}; install it with: pip install 'weft-gnn[serve]'") from None
    with ServerLock(options.db):
        supervisor = Supervisor(options)
        app = make_app(options, supervisor, tokens)
        config = uvicorn.Config(
            app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=2
        )
        server = _Server(uvicorn.Server(config))
        supervisor.start()
        watch = threading.Thread(target=_end_with, args=(supervisor, server), daemon=True)
        watch.start()
        try:
            server.run()
        finally:
            supervisor.stop(drain_seconds)
        if supervisor.error:
            raise WeftError(f"the supervisor ended: {supervisor.error}")


class _Server:
    """uvicorn with signal handlers that say what happens: the first asks for the end, the second forces it."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._server.install_signal_handlers = lambda: None

    def run(self) -> None:
        import asyncio

        before = {number: signal.signal(number, self._end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            asyncio.run(self._server._serve())  # serve() without uvicorn's own handlers, which raise the signal again
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, number: int, _: FrameType | None) -> None:
        if self._server.should_exit:
            os._exit(128 + number)
        print("weft: draining; running groups save their state (a second signal ends at once)", file=sys.stderr)
        self._server.should_exit = True

    def end(self) -> None:
        """Stop answering."""
        self._server.should_exit = True


def _end_with(supervisor: Supervisor, server: _Server) -> None:
    """A server whose supervisor has failed must not go on taking tasks."""
    supervisor._thread.join()
    server.end()
