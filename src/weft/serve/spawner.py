"""The spawner: a process that has imported everything once and forks worker processes from it.

Importing torch and training the first epoch takes seconds; a fork of a process that has done both takes milliseconds
and shares its memory. So a worker that was lost is replaced at once. The spawner itself runs no task, starts no thread
and never touches CUDA, which no fork survives.

It reads one JSON line per worker to start from a Unix socket, with the worker's stdin and stdout attached, and writes
``{"pid": ...}`` and, when a worker has ended, ``{"ended": pid, "code": ...}``.

Every worker leads a session of its own. What a model has started ends with its worker: the rest of the session is
killed, and so are processes that left it, which become children of the spawner (on Linux). Should the spawner be
killed, workers end their groups, and the server replaces them then.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from weft.core.startup import leave_out_of_collections
from weft.core.task import Task
from weft.serve.processes import children, remove_segments
from weft.serve.worker import end_with_parent, prctl, work_on

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether there is a GPU must not start CUDA
PRELOADED = (
    "weft.engine.run",
    "weft.serve.estimates",
    "weft.serve.worker",
    "weft.serve.worker_memory",
    "torch._dynamo",
)
SET_CHILD_SUBREAPER = 36  # of prctl
LOOK_SECONDS = 1.0  # at most between two looks for processes that models have started and left
END_SECONDS = 2.0  # at most until everything has ended that was started here


def warm_up() -> None:
    """Import what workers need and, where torch has no CUDA, train one epoch in one thread: a pool survives no fork."""
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    if torch.version.cuda is None:  # with it, a first backward pass starts a thread per device, which no fork survives
        from weft.engine.run import run
        from weft.serve.estimates import estimate_of

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with suppress(Exception):  # the first task will say what is wrong
            task = Task(graph="demo", model="gcn", hidden=8, epochs=1)
            estimate_of(task, "cpu")
            run(task, device="cpu", progress=False)
        torch.set_num_threads(threads)
    leave_out_of_collections()


def spawn_until_closed(link: socket.socket, parent: int) -> None:
    """Start workers until the supervisor closes the link or has gone; then end them, and whatever they started.

    The system says by SIGTERM that the ``parent`` has ended. While the parent lives, such a signal came from a model.
    """
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    prctl(SET_CHILD_SUBREAPER, 1)
    workers: set[int] = set()
    remove_segments()
    before = children(os.getpid())  # children that were there before any worker
    try:
        link.sendall(b'{"ready": true}\n')
        while True:
            readable, _, _ = select.select([link.fileno(), wake_read], [], [], LOOK_SECONDS)
            if wake_read in readable and signal.SIGTERM in os.read(wake_read, 4096) and os.getppid() != parent:
                return
            with suppress(ChildProcessError):
                while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                    pid = ended.si_pid
                    if pid in workers:  # before it is waited for, so that its number is not in use again
                        _kill(os.killpg, pid)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    if pid in workers:
                        workers.discard(pid)
                        remove_segments()
                        link.sendall(json.dumps({"ended": pid, "code": code}).encode() + b"\n")
            for orphan in children(os.getpid()) - workers - before:
                _kill(os.kill, orphan)
            if link.fileno() in readable:
                text, handles, _, _ = socket.recv_fds(link, 1 << 16, 2)
                if not text:
                    return
                _fork(link, json.loads(text), handles, (wake_read, wake_write), workers)
    finally:
        # End every worker and what they started; what is killed leaves its own children to this process.
        for pid in workers:
            _kill(os.killpg, pid)
        until = time.monotonic() + END_SECONDS
        while (remaining := children(os.getpid()) - before) and time.monotonic() < until:
            for pid in remaining:
                _kill(os.kill, pid)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)
        remove_segments()


def _fork(
    link: socket.socket, request: dict[str, Any], handles: list[int], wake: tuple[int, int], workers: set[int]
) -> None:
    pid = os.fork()
    if pid:
        workers.add(pid)
        for handle in handles:
            os.close(handle)
        link.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        return
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        link.close()
        for handle in wake:
            os.close(handle)
        os.setsid()
        os.dup2(handles[0], 0)
        os.close(handles[0])
        os.environ.update(request["environment"])
        _use_threads(request.get("threads"), request["device"])
        # Work in this fork; on a GPU in a new program, since no fork survives that the spawner has touched CUDA.
        out = handles[1]
        device, keep = request["device"], int(request.get("keep_bytes", 0))
        if device.startswith("cuda"):
            os.dup2(out, 1)
            options = ["--device", device, "--keep-bytes", str(keep)]
            os.execv(sys.executable, [sys.executable, "-m", "weft.serve.worker", *options])
        work_on(device, sys.stdin, out, warm=True, keep_bytes=keep)
    finally:
        os._exit(0)


def _use_threads(count: int | None, device: str) -> None:
    """Compute with ``count`` threads, unless the environment says how many; a new program reads it there."""
    if count is None or "OMP_NUM_THREADS" in os.environ:
        return
    if device.startswith("cuda"):
        os.environ["OMP_NUM_THREADS"] = str(count)
        return
    import torch

    torch.set_num_threads(count)


def _kill(send: Callable[[int, int], None], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        send(number, signal.SIGKILL)


def main() -> None:
    """Run the spawner on the socket whose number is given."""
    number, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with_parent(parent, signal.SIGTERM)  # not at once: what the workers have started ends first
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm_up()
    with socket.socket(fileno=number) as link:
        spawn_until_closed(link, parent)


if __name__ == "__main__":
    main()
