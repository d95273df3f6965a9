"""A worker as its supervisor holds it: the process, the pipe to it, and when it was last heard of."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Inbox = queue.Queue[tuple["WorkerProcess | None", Mapping[str, Any]]]


class WorkerProcess:
    """One worker process; its messages go to ``inbox``, and ``{"say": "gone"}`` when it has ended."""

    def __init__(self, name: str, device: str, inbox: Inbox, log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.device, self._inbox = name, device, inbox
        self.started = self.last_heard = time.monotonic()
        self.ready, self.group, self.bytes = False, "", 0
        self.end_reason = ""  # why the supervisor ended it, if it did
        command = [sys.executable, "-m", "weft.serve.worker", "--device", device, "--parent", str(os.getpid())]
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C in a terminal is for the server, which drains
            )
        self._reader = threading.Thread(target=self._read, name=f"reader of {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Whether it can take a group."""
        return self.ready and not self.group

    def send(self, do: str, **data: Any) -> None:
        """Send a message; one to a process that has ended is lost, and ``gone`` will follow."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps({"do": do, **data}) + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):  # half a line of a process that was killed
                self._inbox.put((self, json.loads(line)))
        self._inbox.put((self, {"say": "gone", "code": self._process.wait()}))

    def kill(self, reason: str) -> None:
        """End the process at once."""
        self.end_reason = self.end_reason or reason
        self._process.kill()

    def stop(self, seconds: float) -> None:
        """Ask it to end, and end it after ``seconds``."""
        self.send("stop")
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(seconds)
        if self._process.stdout is not None:
            self._process.stdout.close()
