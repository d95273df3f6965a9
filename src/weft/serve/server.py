"""``weft serve`` as a function: the supervisor in a thread, the HTTP app in front, and an orderly end."""

from __future__ import annotations

import errno
import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from weft.core.errors import SpecError, WeftError
from weft.serve.options import ServeOptions, check_option, is_gpu_name
from weft.serve.queue_db import take_queue
from weft.serve.submissions import Tokens, is_loopback, make_token_file
from weft.serve.supervisor import Supervisor

try:
    import fcntl
except ImportError:  # Windows: there is no lock
    fcntl = None  # type: ignore[assignment]


OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SAME_WARNING_SECONDS = 60.0  # between two that say the same
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # such as IPv6 on a machine without it


def parse_address(text: str) -> tuple[str, int]:
    """``127.0.0.1:8787`` or ``[::1]:8787`` as host and port."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or len(port) > 5 or int(port) > 65535:
        raise SpecError(f"--bind {text}: expected HOST:PORT, such as 127.0.0.1:8787")
    return host.strip("[]"), int(port)


def find_tokens(db: Path, file: Path | None, no_auth: bool, host: str) -> tuple[Tokens, Path | None]:
    """The tokens to let in by, and the file they are in; without a file, one is made in the folder of the queue."""
    if no_auth:
        if file is not None:
            raise SpecError("--no-auth and --token: give one of them")
        if not is_loopback(host):
            raise SpecError(f"--no-auth with --bind {host}: others could reach it; bind to 127.0.0.1, or use tokens")
        return Tokens(open=True), None
    path = file if file is not None else db.with_name(db.name + ".token")
    if file is None:
        make_token_file(path)
    tokens = Tokens.read(path)
    mode = path.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        told = f"token file {path}: others of this machine may read or write it (mode {mode:04o})"
        print(f"weft: {told}; run: chmod 600 {path}", file=sys.stderr)
    return tokens, path


def make_folder(path: Path) -> None:
    """Make the folder of the queue; a :class:`SpecError` if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(f"{path}: cannot be made ({reason}); name a folder to keep the queue in by --db") from None


def check_devices(options: ServeOptions) -> None:
    """A :class:`SpecError` if a GPU that ``options`` names is not there; counting them starts nothing on a GPU."""
    names = () if "auto" in options.devices else options.device_names()
    gpus = [name for name in names if is_gpu_name(name)]  # others are those of a cluster
    if not gpus:
        return
    import torch

    there = torch.cuda.device_count()
    missing = next((name for name in gpus if int(name.removeprefix("cuda:")) >= there), None)
    if missing is not None:
        present = " and ".join(("cpu", *(f"cuda:{index}" for index in range(there))))
        raise SpecError(f"device {missing!r} is not there; this machine has {present}")


@contextmanager
def server_lock(db: Path) -> Iterator[None]:
    """One server per queue file, by whatever name; the system lets go of the lock however the server ends."""
    # On Linux SQLite's own locks are of another kind than this one; elsewhere they would wait for each other.
    path = db if sys.platform == "linux" else db.with_name(db.name + ".lock")
    make_folder(path.parent)
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(f"{path}: cannot be written ({reason}); a queue needs a file to write to") from None
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise SpecError(f"{db}: another server works on this queue; use that one") from None
    try:
        yield
    finally:
        os.close(handle)


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets of every address that ``host`` stands for (``localhost``: of IPv4 and IPv6), all of one port.

    An address that this machine does not have is left out while another one can be had; a :class:`SpecError` if none
    can, or if one of them is taken.
    """
    made: list[socket.socket] = []
    missing: OSError | None = None
    try:
        addresses = dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        for family, kind, protocol, _, address in addresses:
            chosen = int(made[0].getsockname()[1]) if made else port
            try:
                made.append(_bound(family, kind, protocol, (address[0], chosen or port, *address[2:])))
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise
                missing = error
        if not made and missing is not None:
            raise missing
    except OSError as error:
        for opened in made:
            opened.close()
        reason = (error.strerror or str(error)).lower()
        raise SpecError(f"--bind {host}:{port}: {reason}; choose another address or port") from None
    return made


def _bound(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # the address of IPv4 has a socket of its own
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def serve(
    options: ServeOptions,
    host: str,
    port: int,
    tokens: Tokens,
    drain_seconds: float = 60.0,
    begun: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then let running groups save their state, which the next server resumes from.

    ``begun`` is called once the queue and the address are this server's.
    """
    check_option("drain_seconds", drain_seconds)
    check_devices(options)
    try:
        import uvicorn

        from weft.serve.app import MOST_WAITING, BoundedConnection, make_app, most_connections
    except ImportError as error:
        raise SpecError(f"weft serve needs {error.name!r}; install it with: pip install 'weft-gnn[serve]'") from None
    with server_lock(options.db), ExitStack() as stack:
        addresses = [stack.enter_context(opened) for opened in bound_sockets(host, port)]
        owner = take_queue(options.db)  # which reports a file that cannot be used before anything starts
        begun()
        supervisor = Supervisor(options, owner)
        app = make_app(options, supervisor, tokens)
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            backlog=min(MOST_WAITING, most_connections() // 4),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        logging.getLogger("uvicorn.error").addFilter(Seldom())
        server = uvicorn.Server(config)

        def end_after_supervisor() -> None:  # a server without one must not accept tasks
            supervisor.join()
            server.should_exit = True

        # The scheduler computes in this process as well, and a request waits for it at every step: for 5 ms by Python's
        # default, and for 50 ms while all objects of 5,000 tasks are looked through for garbage, which has no cycles.
        sys.setswitchinterval(0.0005)
        gc.freeze()
        gc.set_threshold(20_000, 20, 100)
        supervisor.start()
        threading.Thread(target=end_after_supervisor, daemon=True).start()
        try:
            _answer(server, addresses)
        finally:
            supervisor.stop(drain_seconds)
        if supervisor.error:
            raise WeftError(f"the supervisor ended: {supervisor.error}")


def _answer(server: Any, addresses: Sequence[socket.socket]) -> None:
    """Run uvicorn with signal handlers that say what happens: the first asks for the end, the second forces it."""
    import asyncio

    def end(number: int, _: FrameType | None) -> None:
        if server.should_exit:
            os._exit(128 + number)
        print("weft: draining; running groups save their state (a second signal ends at once)", file=sys.stderr)
        server.should_exit = True

    async def answer() -> None:
        asyncio.get_running_loop().set_exception_handler(_log_trouble)
        # serve() without uvicorn's own handlers, which raise the signal again
        await server._serve(sockets=list(addresses))

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        asyncio.run(answer())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Seldom(logging.Filter):
    """Limits how often a warning is written: any client that can connect could fill the disk with them."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is to be written."""
        now = time.monotonic()
        if record.levelno > logging.WARNING:
            return True
        if now - self._last.get(str(record.msg), -math.inf) < SAME_WARNING_SECONDS:
            return False
        self._last[str(record.msg)] = now
        return True


def _log_trouble(loop: Any, context: dict[str, Any]) -> None:
    """What went wrong outside of a request, in one line where the system is out of something, as files to open."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in OUT_OF:
        logging.getLogger("uvicorn.error").warning("weft: connections wait: %s", error.strerror)
    else:
        loop.default_exception_handler(context)
