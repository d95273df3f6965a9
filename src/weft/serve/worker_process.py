"""Worker processes as their supervisor holds them, and the spawner that forks them."""

from __future__ import annotations

import json
import math
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError
from weft.core.units import show_bytes

Inbox = queue.Queue[tuple["WorkerProcess | None", Mapping[str, Any]]]
READY_SECONDS, CODE_SECONDS = 300.0, 5.0
MOST_LINE_BYTES = 64 << 20  # of one message
POLL_MILLISECONDS = 500  # between two looks whether a worker that says nothing has ended


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker starts with; ``keep_bytes``: of graphs between groups, in a pool if ``pooled``."""

    environment: Mapping[str, str] = field(default_factory=dict)
    keep_bytes: int = 0
    pooled: bool = False


class Spawner:
    """The process that forks workers; started when the first worker is, and again should it have ended.

    ``threads``: of each worker (None: as many as torch takes).
    """

    def __init__(self, log: Path, environment: Mapping[str, str], threads: int | None = None) -> None:
        self._log, self._environment, self._threads = log, environment, threads
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._answers: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._alive: set[int] = set()  # workers that the present process has started
        self._codes: dict[int, int] = {}
        self._changed = threading.Condition()
        self._lock = threading.Lock()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "weft.serve.spawner", str(theirs.fileno()), str(os.getpid())]
        self._link, self._answers, self._alive = ours, queue.Queue(), set()
        with theirs, open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is for the server, which drains
            )
        threading.Thread(
            target=self._read, args=(ours, self._answers, self._alive), name="spawner", daemon=True
        ).start()
        self._answer("ready", READY_SECONDS)

    def _read(self, link: socket.socket, answers: queue.Queue[Mapping[str, Any]], alive: set[int]) -> None:
        with link.makefile("r", encoding="utf-8") as lines, suppress(OSError, ValueError):
            for line in lines:
                message = json.loads(line)
                if "ended" in message:
                    self._note_ended({message["ended"]: message["code"]}, alive)
                else:
                    alive |= {message["pid"]} if "pid" in message else set()
                    answers.put(message)
        answers.put({"gone": True})
        self._note_ended(dict.fromkeys(alive, -signal.SIGKILL), alive)  # workers end with their spawner

    def _note_ended(self, codes: Mapping[int, int], alive: set[int]) -> None:
        with self._changed:
            alive.difference_update(codes)
            self._codes.update(codes)
            self._changed.notify_all()

    def _answer(self, name: str, seconds: float) -> Any:
        try:
            message = self._answers.get(timeout=seconds)
        except queue.Empty:
            message = {}
        if name not in message:
            self.stop()
            raise WeftError(f"no worker could be started; see {self._log}")
        return message[name]

    def fork(self, device: str, options: WorkerOptions, handles: tuple[int, int]) -> int:
        """Start a worker with stdin and stdout ``handles``; its process id."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self._start()
            assert self._link is not None
            request = {"device": device, "threads": self._threads, **asdict(options)}
            socket.send_fds(self._link, [json.dumps(request).encode()], list(handles))
            return int(self._answer("pid", CODE_SECONDS * 4))

    def code_of(self, pid: int) -> int | None:
        """The exit code of a worker that has ended, negative for a signal; None if it is not known."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes, CODE_SECONDS)
            return self._codes.pop(pid, None)

    def says_ended(self, pid: int) -> bool:
        """True if a worker has ended whose code has not been read."""
        with self._changed:
            return pid in self._codes

    def stop(self) -> None:
        """End it: it ends what it has started first, for which it has some seconds."""
        if self._link is not None:
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
            self._link.close()
            self._link = None
        if self._process is not None:
            until = time.monotonic() + CODE_SECONDS
            while self._process.poll() is None and time.monotonic() < until:
                time.sleep(0.005)
            self._process.kill()
            self._process.wait()
            self._process = None


def _with_pipes(start: Callable[[int, int], int]) -> tuple[int, tuple[int, int]]:
    """A process that ``start`` gives its ends of two pipes; its id, and our ends. Nothing stays open if it fails."""
    handles: list[int] = []
    try:
        handles += os.pipe()
        handles += os.pipe()
        to_read, to_write, from_read, from_write = handles
        pid = start(to_read, from_write)
    except BaseException:
        for handle in handles:
            os.close(handle)
        raise
    os.close(to_read)
    os.close(from_write)
    return pid, (to_write, from_read)


def message_in(line: bytes | str) -> Mapping[str, Any]:
    """The message in a line of a worker; a :class:`ValueError` if it has none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("say"), str):
        raise ValueError("sent a line that is no message")
    return message


class WorkerProcess:
    """One worker process; its messages go to ``inbox``, and ``{"say": "gone"}`` when it has ended.

    ``lost``: the machine that it was on is gone, so another cannot be started there. ``renewed``: it was ended to make
    way for a fresh one, though nothing had gone wrong.
    """

    lost = renewed = False

    def __init__(
        self, name: str, device: str, inbox: Inbox, spawner: Spawner, options: WorkerOptions | None = None
    ) -> None:
        self.name, self.device, self._inbox, self._spawner = name, device, inbox, spawner
        self.started = self.last_heard = time.monotonic()
        self.ready, self.group, self.bytes = False, "", 0
        self.end_reason = ""  # why the supervisor ended it, if it did
        self.fetched: Mapping[str, Any] = {}  # what it was last sent to prepare
        self.pid, (to_write, from_read) = _with_pipes(
            lambda *handles: spawner.fork(device, options or WorkerOptions(), handles)
        )
        self._in, self._out = os.fdopen(to_write, "w", encoding="utf-8"), from_read
        self._ended, self._outbox = threading.Event(), queue.SimpleQueue[str | None]()
        self._reader = threading.Thread(target=self._read, name=f"reader of {name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name=f"writer to {name}", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether it can take a group."""
        return self.ready and not self.group and not self.end_reason

    def send(self, do: str, **data: Any) -> None:
        """Send a message, without waiting until it is read: a process that hangs must not hold up who ends it.

        One to a process that has ended is lost, and ``gone`` will follow.
        """
        self._outbox.put(json.dumps({"do": do, **data}) + "\n")

    def _write(self) -> None:
        with suppress(OSError, ValueError):
            while (line := self._outbox.get()) is not None:
                self._in.write(line)
                self._in.flush()
        with suppress(OSError):
            self._in.close()

    def _read(self) -> None:
        try:
            self._relay()
        finally:
            code = self._spawner.code_of(self.pid)
            if code is None:
                self.kill("closed its pipe to the server")
                code = self._spawner.code_of(self.pid)
            self._ended.set()
            self._inbox.put((self, {"say": "gone", "code": code}))
            os.close(self._out)

    def _relay(self) -> None:
        """Pass messages on until the process has ended, though a process that its model forked holds the pipe open.

        A process that writes a line that is no message is ended: a model can reach the pipe.
        """
        watched, until = select.poll(), math.inf
        unread: list[bytes] = []
        watched.register(self._out, select.POLLIN)
        while time.monotonic() < until:
            if watched.poll(POLL_MILLISECONDS):
                text = os.read(self._out, 1 << 16)
                if not text:
                    return
                unread.append(text)
                if b"\n" in text:
                    *lines, rest = b"".join(unread).split(b"\n")
                    unread = [rest]
                    try:
                        for line in lines:
                            self._inbox.put((self, message_in(line)))
                    except ValueError as error:
                        self.kill(str(error))
                        return
                if sum(map(len, unread)) > MOST_LINE_BYTES:
                    self.kill(f"sent a line of more than {show_bytes(MOST_LINE_BYTES)}")
                    return
            elif until < math.inf:
                return
            if until == math.inf and self._spawner.says_ended(self.pid):
                until = time.monotonic() + CODE_SECONDS

    def renew(self) -> None:
        """End the process, so that a fresh one takes its place: code that is not Weft's may have changed anything."""
        self.renewed = not self.end_reason
        self.kill("is replaced after code that is not Weft's own")

    def kill(self, reason: str) -> None:
        """End the process at once."""
        self.end_reason = self.end_reason or reason
        for send in (os.killpg, os.kill) if not self._ended.is_set() else ():  # at first it leads no group
            with suppress(ProcessLookupError):
                send(self.pid, signal.SIGKILL)

    def stop(self, seconds: float) -> None:
        """Ask it to end, and end it after ``seconds``."""
        self.send("stop")
        self._outbox.put(None)
        if not self._ended.wait(seconds):
            self.kill("did not end by itself")
            self._ended.wait(CODE_SECONDS)
        self._reader.join(CODE_SECONDS)
