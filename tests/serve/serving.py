"""Servers for the tests: a supervisor in this process, or ``weft serve`` as a process of its own, on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import weft
from tests.serve.direct_queue import DirectQueue
from weft.core.task import Task
from weft.serve.options import MIB, ServeOptions
from weft.serve.queue_db import ENDED, Submission
from weft.serve.supervisor import Supervisor

ROOT = Path(__file__).parents[2]
FAULTY = "tests.serve.faulty_models"
TASK = {"graph": "demo", "model": "gcn", "hidden": 8, "epochs": 30}


def environment(folder: Path) -> dict[str, str]:
    """What worker processes need to find Weft, the models of the tests, and a home of their own."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    home = folder / "home"
    return {
        "PYTHONPATH": paths,
        "WEFT_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "WEFT_TEST_FOLDER": str(folder),
    }


class Queue:
    """A supervisor in this process, over a queue in ``folder``."""

    def __init__(self, folder: Path, **more) -> None:
        settings = {"devices": ("cpu",), "models": (f"{FAULTY}:*",), "environment": environment(folder)}
        settings |= {"checkpoint_seconds": 0.1, "overrun_bytes": 600 * MIB, "hang_seconds": 60.0}
        self.options = ServeOptions(folder / "queue.db", **{**settings, **more})
        self.supervisor = Supervisor(self.options)
        self.db = DirectQueue(self.options.db)
        self.supervisor.start()

    def submit(self, *settings, **more) -> list[str]:
        """Queue tasks together; their ids."""
        found = self.db.submit_many([Submission({"task": {**TASK, **one}}, **more) for one in settings])
        self.supervisor.wake()
        return [task.id for task in found]

    def train_together(self, *settings, options=None, seconds: float = 90.0) -> list[str]:
        """Queue tasks, each as a submission of its own, that all become ready at one time; their ids, once done."""
        names = self.start_together(*settings, options=options, seconds=seconds)
        done = self.wait(names, seconds)
        assert [task.state for task in done] == ["done"] * len(names), [task.error for task in done]
        return names

    def start_together(self, *settings, options=None, seconds: float = 90.0) -> list[str]:
        """The same, without waiting for them."""
        [gate] = self.submit({"epochs": 1, "hidden": 4, "seed": time.time_ns()})
        self.db.pause(gate)
        specs = [{"task": one, **({"options": options} if options else {})} for one in settings]
        names = [self.db.submit(Submission(spec, after=(gate,))).id for spec in specs]
        self.supervisor.wake()
        self.until(lambda: all(self.db.get(name).state == "planned" for name in names), seconds)
        self.db.resume(gate)
        self.supervisor.wake()
        return names

    def group_of(self, name: str):
        """The group that a task which is done was trained in."""
        self.until(lambda: not self.db.groups("running"))
        return next(group for group in self.db.groups("ended") if name in group.members)

    def wait(self, names, seconds: float = 90.0):
        """The tasks, once all have ended."""
        self.until(lambda: all(self.db.get(name).state in ENDED for name in names), seconds)
        return [self.db.get(name) for name in names]

    def until(self, condition, seconds: float = 60.0) -> None:
        """Return once ``condition()`` holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.told()
            assert self.supervisor.is_alive(), self.supervisor.error
            time.sleep(0.02)

    def told(self) -> str:
        """What to print where something took too long."""
        log = self.options.runs / "workers.log"
        states = [(task.id, task.state, task.error) for task in self.db.tasks()]
        return f"{states}\n{self.supervisor.view['why']}\n{log.read_text() if log.exists() else ''}"

    def epoch(self, name: str) -> int:
        """The last epoch that a task reported."""
        seen = [e.data.get("epoch") or 0 for e in self.db.events(task=name, limit=10_000) if e.kind == "checkpoint"]
        return max(seen, default=0)

    def worker_pid(self) -> int:
        """The process that trains."""
        return self.supervisor.pool.workers["cpu/0"].pid

    def history(self, name: str) -> dict:
        """The numbers of a task that is done."""
        return json.loads((self.options.runs / self.db.get(name).result["folder"] / "result.json").read_text())[
            "history"
        ]

    def close(self) -> None:
        """End it."""
        self.supervisor.stop(20.0)
        self.db.close()


def history_of(work) -> dict[str, dict]:
    """The numbers of ``weft.run``, by the names of the tasks."""
    with one_thread():
        found = weft.run(work, device="cpu", progress=False)
    results = [found] if isinstance(work, Task) else list(found)
    return {one.name: one.history for one in results}


@contextmanager
def one_thread():
    """As many threads as the workers of the tests have."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ServeProcess:
    """``weft serve`` as a process; :meth:`kill` and :meth:`start` as often as needed."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self._options = folder, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.db = folder / "queue.db"
        self.process: subprocess.Popen | None = None

    def start(self, wait: bool = True) -> ServeProcess:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "weft", "serve", "--db", str(self.db), "--bind", f"127.0.0.1:{self.port}"]
        log = open(self.folder / "serve.log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, "--devices", "cpu", *self._options],
            env={**os.environ, **environment(self.folder)},
            stdout=log,
            stderr=log,
        )
        log.close()
        end = time.monotonic() + 30.0
        while wait and not self._answers():
            assert time.monotonic() < end, (self.folder / "serve.log").read_text()
            assert self.process.poll() is None, (self.folder / "serve.log").read_text()
            time.sleep(0.05)
        return self

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/", timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
            return True
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """``kill -9``."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(30)
            self.kill()
        return self.process.returncode


@contextmanager
def opened(folder, **options):
    """A queue that is closed at the end; its supervisor must not have failed."""
    queue = Queue(folder, **options)
    try:
        yield queue
    finally:
        queue.close()
    assert queue.supervisor.error == ""
