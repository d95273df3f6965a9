"""A queue of trainings in PyG: worker processes that take one task after another, in order of arrival.

One worker is the sequential baseline, without the start of a process per task that PyG's users pay: it imports and
starts CUDA once. Several workers under NVIDIA's MPS are the baseline without admission: whatever is next starts on the
next free worker, whatever memory it takes.

As a program it is such a worker: it reads a line of JSON per task and answers each with a line of JSON.
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
from typing import Any

from weft.sched.simulation import GroupRun, Simulation, TaskRun

Settings = Mapping[str, Any]
LEFT_BYTES = 256 << 20  # more than the workspaces of libraries, which stay


class PyGWorker:
    """A worker process; :meth:`train` blocks until its task is done."""

    def __init__(self, device: str, environment: Mapping[str, str] | None = None) -> None:
        begin = time.perf_counter()
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.queue_runs.pyg_queue", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        )
        self._answer()
        self.start_seconds = time.perf_counter() - begin

    def train(self, settings: Settings) -> dict[str, Any]:
        """What the process says of a task."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dict(settings)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a PyG worker ended with code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

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


class PyGWorkers:
    """Workers that stay from one queue to the next; one that has ended is replaced."""

    def __init__(self, count: int, device: str, environment: Mapping[str, str] | None = None) -> None:
        self._count, self._device, self._environment = count, device, environment
        self._workers: list[PyGWorker] = []

    def ready(self) -> list[PyGWorker]:
        """All of them, with nothing left of former queues."""
        for worker in [worker for worker in self._workers if not worker.alive]:
            worker.stop()
            self._workers.remove(worker)
        for worker in self._workers:
            worker.train({"clear": True})
        while len(self._workers) < self._count:
            self._workers.append(PyGWorker(self._device, self._environment))
        return list(self._workers)

    def stop(self) -> None:
        """End all."""
        for worker in self._workers:
            worker.stop()


def run_in_order(
    name: str, workers: Sequence[PyGWorker], tasks: Mapping[str, Settings]
) -> tuple[Simulation, dict[str, Any]]:
    """Every task on the next free worker, in order; when each ran, and what went wrong."""
    waiting: queue.Queue[tuple[str, Settings]] = queue.Queue()
    for one in tasks.items():
        waiting.put(one)
    rows: list[tuple[str, int, float, float, dict[str, Any]]] = []
    begin = time.perf_counter()

    def work(place: int) -> None:
        while True:
            try:
                label, settings = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.perf_counter() - begin
            try:
                said = workers[place].train(settings)
            except RuntimeError as error:
                said = {"error": str(error)}
            rows.append((label, place, start, time.perf_counter() - begin, said))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [row for row in rows if "error" not in row[4]]
    runs = tuple(TaskRun(label, label, 0.0, start, end) for label, _, start, end, _ in done)
    groups = tuple(GroupRun(label, "device", place, (label,), said.get("peak_bytes", 0), start, end, "is next")
                   for label, place, start, end, said in done)  # fmt: skip
    errors = {label: said["error"] for label, *_, said in rows if "error" in said}
    return Simulation(name, runs, groups), {
        "failed": errors,
        "out_of_memory": sum("memory" in e for e in errors.values()),
    }


# ---- the worker ----------------------------------------------------------------------------------------


def main() -> None:
    """Train what comes in on stdin."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch

    device = torch.device(sys.argv[1])
    from benchmarks.baselines.pyg_training import train_pyg
    from weft.core.task import Task
    from weft.graph.readers import read

    import_pyg()
    if device.type == "cuda":
        torch.zeros(1, device=device)
    else:
        torch.set_num_threads(1)  # workers share the processor
    say(answers, {"ready": True})
    graphs: dict[str, Any] = {}
    for line in sys.stdin:
        settings = json.loads(line)
        if settings.get("clear"):
            graphs.clear()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            say(answers, {"cleared": True})
            continue
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
            task = Task(**settings)
            trained = train_pyg(task, graphs[path].to(device))
            found = {"seconds": time.perf_counter() - begin, "trained_seconds": trained.seconds}
            found["peak_bytes"] = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}
        say(answers, found)


def import_pyg() -> None:
    """Load PyG before the first task."""
    import torch_geometric.nn  # noqa: F401


def say(out: Any, message: Mapping[str, Any]) -> None:
    """One line of JSON."""
    out.write(json.dumps(dict(message)) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
