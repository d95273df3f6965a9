"""Spawners forked from one that has imported everything: the queues of a test session warm up once, not once each.

What is forked runs the spawner's own loop, in an environment and with a log of its own; only the seconds of its
imports and of its first epoch are shared. Servers that are processes of their own, and tests of what the start of a
spawner does, have real ones.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from weft.serve import worker_pool

ROOT = Path(__file__).parents[2]
OWN = (  # variables that nothing reads while it is imported
    "WEFT_HOME",
    "WEFT_TEST_FOLDER",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # set by the spawner's module
    "TORCHINDUCTOR_CACHE_DIR",  # set by torch when it first compiles
)


def shared_part(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that have to be those of the process that is forked."""
    return {name: value for name, value in environment.items() if name not in OWN}


class Forked:
    """A spawner that was forked, with what its owner uses of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid, self._handle = pid, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """None while it runs."""
        return 0 if self._handle < 0 or self._ended(0.0) else None

    def _ended(self, seconds: float | None) -> bool:
        return bool(select.select([self._handle], [], [], seconds)[0])

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self._handle >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Return once it has ended."""
        if self._handle >= 0:
            self._ended(None)
            os.close(self._handle)
            self._handle = -1
        return 0


class Source:
    """The process that spawners are forked from; ends with this one."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair()
        self._lock, self._folder = threading.Lock(), os.getcwd()
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self._environment = shared_part(environment)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.serve.warm_spawners", str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )

    def popen(self, command: Sequence[str], **more: Any) -> Forked | subprocess.Popen[bytes]:
        """A spawner as ``command`` would start it; by ``command`` where something differs that imports may read."""
        if shared_part(more["env"]) != self._environment or os.getcwd() != self._folder:
            return subprocess.Popen(command, **more)
        wanted = json.dumps({name: more["env"][name] for name in OWN if name in more["env"]}).encode()
        with self._lock:
            socket.send_fds(self._link, [wanted], [*more["pass_fds"], more["stdout"].fileno()])
            return Forked(int(self._link.recv(64)))

    def close(self) -> None:
        """End it."""
        self._link.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def warm_spawners() -> Iterator[None]:
    """Within it, supervisors of this process have spawners that are warm already."""
    if not hasattr(os, "pidfd_open"):
        yield
        return
    source = Source()
    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": source.popen})
    try:
        with patch.object(worker_pool, "subprocess", stand_in):
            yield
    finally:
        source.close()


def main() -> None:
    """Fork a spawner for every message, until the link is closed."""
    from weft.serve import spawner

    spawner.warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as link:
        while True:
            text, handles, _, _ = socket.recv_fds(link, 1 << 16, 2)
            if not text:
                os._exit(0)
            source, pid = os.getpid(), os.fork()
            if not pid:
                _become_spawner(link, json.loads(text), handles, source)
            for handle in handles:
                os.close(handle)
            link.sendall(str(pid).encode())


def _become_spawner(link: socket.socket, environment: Mapping[str, str], handles: Sequence[int], source: int) -> None:
    from weft.serve import spawner

    try:
        link.close()
        os.setsid()
        spawner.end_with_parent(source)
        for standard in (1, 2):
            os.dup2(handles[1], standard)
        os.close(handles[1])
        os.environ.update(environment)
        with socket.socket(fileno=handles[0]) as own:
            spawner.spawn_until_closed(own, source)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
