"""A worker of the queue on a node of a Ray cluster.

An actor on the node starts the worker process and relays its lines; to the supervisor it is a worker like any other. If
the node is lost, so is the worker, and what it trained continues on another one from its checkpoint: the folder of runs
has to be visible to all nodes.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from weft.cluster.ray import import_ray, nodes_of
from weft.serve.worker_pool import CODE_SECONDS, Inbox, WorkerOptions, WorkerProcess, message_in

RELAY_SECONDS = 1.0
LINES_AT_ONCE = 1000


class WorkerHost:
    """Runs on a node: a worker process, its lines in and out."""

    def __init__(self, device: str, options: WorkerOptions) -> None:
        command = [sys.executable, "-m", "weft.serve.worker", "--device", device]
        command += ["--parent", str(os.getpid()), "--keep-bytes", str(options.keep_bytes)]
        self._lines: queue.Queue[str] = queue.Queue()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **options.environment}
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def pid(self) -> int:
        """The worker process there."""
        return self._process.pid

    def write(self, line: str) -> None:
        """A line to the worker; lost if it has ended."""
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def read(self, seconds: float) -> tuple[list[str], int | None]:
        """Lines of the worker, waited for at most ``seconds``, and its exit code once it has ended and said all."""
        lines: list[str] = []
        with suppress(queue.Empty):
            lines.append(self._lines.get(timeout=seconds))
            while len(lines) < LINES_AT_ONCE:
                lines.append(self._lines.get_nowait())
        return lines, None if lines else self._process.poll()


class RayWorker(WorkerProcess):
    """A worker on a node; ``device`` is ``DEVICE@NODE``."""

    orphaned = 0

    def __init__(self, name: str, device: str, inbox: Inbox, options: WorkerOptions) -> None:
        self.name, self.device, self._inbox, self.questions = name, device, inbox, {}
        self.last_heard, self._ended, self._ray = time.monotonic(), threading.Event(), import_ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(self.node, soft=False)
        kind = device.partition("@")[0]
        gpus = 1 if kind.startswith("cuda") else 0
        made = self._ray.remote(num_cpus=0, num_gpus=gpus, max_concurrency=4, scheduling_strategy=there)(WorkerHost)
        self._host = made.remote("cuda:0" if gpus else kind, options)  # Ray shows it its own GPU alone, as number 0
        self._reader = threading.Thread(target=self._read, name=f"reader of {name}", daemon=True)
        self._reader.start()

    @property
    def node(self) -> str:
        """The id of its node."""
        return self.device.partition("@")[2]

    def send(self, do: str, **data: Any) -> None:
        """Send a message; one to a worker that is gone is lost, and ``gone`` will follow."""
        with suppress(self._ray.exceptions.RayError):
            self._host.write.remote(json.dumps({"do": do, **data}) + "\n")

    def _read(self) -> None:
        code: int | None = None
        try:
            self.pid = self._ray.get(self._host.pid.remote())
            while code is None:
                lines, code = self._ray.get(self._host.read.remote(RELAY_SECONDS))
                for line in lines:
                    with suppress(ValueError):
                        self.deliver(message_in(line))
        except Exception:  # the actor, its node or the whole cluster is gone
            with suppress(Exception):
                self.lost = self.node not in {node.id for node in nodes_of(self._ray)}
            if self.lost:
                self.end_reason = self.end_reason or f"its node {self.node[:8]} was lost"
        self._ended.set()
        self.end_questions()
        self._inbox.put((self, {"say": "gone", "code": code}))

    def kill(self, reason: str) -> None:
        """End the worker at once."""
        self.end_reason = self.end_reason or reason
        if not self._ended.is_set():
            with suppress(Exception):
                self._ray.kill(self._host)

    def stop(self, seconds: float) -> None:
        """Ask it to end, and end it after ``seconds``."""
        self.send("stop")
        if not self._ended.wait(seconds):
            self.kill("did not end by itself")
            self._ended.wait(CODE_SECONDS)
        with suppress(Exception):
            self._ray.kill(self._host)
        self._reader.join(CODE_SECONDS)
