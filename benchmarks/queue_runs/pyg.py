"""A queue of trainings in PyG: warm worker processes that take one task after another, in order of arrival.

One worker is the sequential baseline, several share the GPU under NVIDIA's MPS; both without the start of a process per
task that PyG's users pay: a worker imports and starts CUDA once. If one ends or does not answer in time, its task and
the later ones of that worker fail, and nothing waits for ever.

As a program this is the worker: it reads a line of JSON per task and answers each with a line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from benchmarks.queue_runs.team import Arrival
from weft.sched.simulator import SimulatedGroup, Simulation, TaskRun

Settings = Mapping[str, Any]
LEFT_BYTES = 256 << 20  # more than the workspaces of libraries, which stay
READY_SECONDS = 120.0
LONGEST, GRACE = 300.0, 10.0  # seconds of a task and of a queue; for what has begun when warming up should be over
PROGRAM = ("-W", "ignore", "-m", "benchmarks.queue_runs.pyg")


class WorkerLost(RuntimeError):
    """A worker process has ended, or did not answer in time and was ended."""


class PyGWorker:
    """A worker process; :meth:`train` blocks until its task is done, or the worker is lost."""

    def __init__(
        self, device: str, program: Sequence[str] = PROGRAM, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._begin = time.perf_counter()
        self._lines: queue.Queue[str] = queue.Queue()
        self.start_seconds = 0.0
        self._process = subprocess.Popen(
            [sys.executable, *program, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Return once it has loaded everything."""
        self._answer(seconds)
        self.start_seconds = time.perf_counter() - self._begin

    def train(self, settings: Settings, seconds: float = LONGEST) -> dict[str, Any]:
        """What the process says of a task within so many seconds; :class:`WorkerLost` if nothing."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(dict(settings)) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerLost(f"a PyG worker ended with code {self._process.wait()}") from None
        return self._answer(seconds)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError, OSError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            self._process.kill()  # a late answer must not be taken for that of the next task
            self._process.wait()
            raise WorkerLost(f"a PyG worker did not answer within {seconds:.0f} s") from None
        if not line:
            raise WorkerLost(f"a PyG worker ended with code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        """End the process."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(GRACE)
        assert self._process.stdout is not None
        self._process.stdout.close()


def warm_up(worker: PyGWorker, tasks: Sequence[Settings], seconds: float) -> None:
    """Train every one of ``tasks``, for ``seconds`` at most; WorkerLost if the process ended or did not answer."""
    end = time.perf_counter() + seconds
    for settings in tasks:
        left = end - time.perf_counter()
        if left <= 0:
            return
        worker.train(settings, left + GRACE)


def run_in_order(
    name: str, worker: PyGWorker, tasks: Mapping[str, Settings], seconds: float = LONGEST
) -> tuple[Simulation, dict[str, Any]]:
    """Every task after the other; when each ran, and what went wrong.

    A lost worker takes its own and all later tasks with it. TimeoutError if ``seconds`` were not enough for all.
    """
    runs, groups, errors = [], [], {}
    begin = time.perf_counter()
    for label, settings in tasks.items():
        start = time.perf_counter() - begin
        try:
            said = worker.train(settings, seconds - start)
        except WorkerLost as error:
            said = {"error": str(error)}
        end = time.perf_counter() - begin
        if end >= seconds:
            raise TimeoutError(f"{seconds:.0f} s were not enough for {name}: {len(runs)} of {len(tasks)} tasks ended")
        if "error" in said:
            errors[label] = said["error"]
            continue
        runs.append(TaskRun(label, label, 0.0, start, end))
        groups.append(SimulatedGroup(label, "device", 0, (label,), said.get("peak_bytes", 0), start, end, "is next"))
    memory = sum("memory" in error for error in errors.values())
    return Simulation(name, tuple(runs), tuple(groups)), {"failed": errors, "out_of_memory": memory}


def run_arriving(
    name: str, workers: Sequence[PyGWorker], arrivals: Sequence[Arrival], seconds: float
) -> tuple[Simulation, dict[str, Any]]:
    """Every task, once it has arrived, by the next free worker; when each ran, and what went wrong.

    TimeoutError if ``seconds`` were not enough for all.
    """
    waiting: queue.Queue[Arrival | None] = queue.Queue()
    runs: list[TaskRun] = []
    groups: list[SimulatedGroup] = []
    errors: dict[str, str] = {}
    begin = time.perf_counter()

    def serve(number: int, worker: PyGWorker) -> None:
        while (one := waiting.get()) is not None:
            start = time.perf_counter() - begin
            try:
                said = worker.train({**one.settings, **({"infer": dict(one.infer)} if one.of else {})}, seconds - start)
            except WorkerLost as error:
                said = {"error": str(error)}
            end = time.perf_counter() - begin
            if "error" in said:
                errors[one.label] = said["error"]
                continue
            runs.append(TaskRun(one.label, one.label, one.at, start, end))
            held = said.get("peak_bytes", 0)
            groups.append(SimulatedGroup(one.label, "device", number, (one.label,), held, start, end, "is next"))

    threads = [threading.Thread(target=serve, args=pair, daemon=True) for pair in enumerate(workers)]
    for thread in threads:
        thread.start()
    for one in sorted(arrivals, key=lambda one: one.at):
        time.sleep(max(one.at - (time.perf_counter() - begin), 0.0))
        waiting.put(one)
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join(max(seconds - (time.perf_counter() - begin), 0.0) + GRACE)
    if time.perf_counter() - begin >= seconds:
        raise TimeoutError(f"{seconds:.0f} s were not enough for {name}: {len(runs)} of {len(arrivals)} tasks ended")
    memory = sum("memory" in error for error in errors.values())
    return Simulation(name, runs, groups), {"failed": errors, "out_of_memory": memory}


# ---- the worker ----------------------------------------------------------------------------------------


def main() -> None:
    """Train what comes in on stdin."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch

    device = torch.device(sys.argv[1])
    import torch_geometric.nn  # noqa: F401

    from benchmarks.baselines.pyg_loops import infer, train
    from weft.core.task import Task
    from weft.graph.readers import read

    if device.type == "cuda":
        torch.zeros(1, device=device)
    else:
        torch.set_num_threads(1)  # workers share the processor
    say(answers, {"ready": True})
    graphs: dict[str, Any] = {}
    for line in sys.stdin:
        settings = json.loads(line)
        try:
            path = settings["graph"]
            graphs.setdefault(path, None)
            if graphs[path] is None:
                graphs[path] = read(path)
            if device.type == "cuda":  # a script of its own would find nothing cached
                if torch.cuda.memory_allocated(device) > LEFT_BYTES:
                    gc.collect()  # takes a tenth of a second that no script pays: only if a task left something
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            begin = time.perf_counter()
            nodes = settings.pop("infer", {}).get("nodes")
            task, graph = Task.from_dict(settings), graphs[path].to(device)
            seconds = train(task, graph).seconds if nodes is None else 0.0 * len(infer(task, graph, nodes))
            found = {"seconds": time.perf_counter() - begin, "trained_seconds": seconds}
            found["peak_bytes"] = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}
        say(answers, found)


def say(out: Any, message: Mapping[str, Any]) -> None:
    """One line of JSON."""
    out.write(json.dumps(dict(message)) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
