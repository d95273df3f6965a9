"""A queue of trainings in PyG: worker processes that take one task after another, in order of arrival.

One worker is the sequential baseline, without the start of a process per task that PyG's users pay: it imports and
starts CUDA once. Several workers under NVIDIA's MPS are the baseline without admission: whatever is next starts on the
next free worker, whatever memory it takes. A worker that ends or does not answer takes its task with it; the others go
on, and nothing waits for ever.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from weft.sched.simulator import SimulatedGroup, Simulation, TaskRun

Settings = Mapping[str, Any]
LEFT_BYTES = 256 << 20  # more than the workspaces of libraries, which stay
READY_SECONDS, CLEAR_SECONDS = 120.0, 30.0
LONGEST, GRACE = 300.0, 10.0  # seconds of a task and of a queue; for what has begun when warming up should be over
PROGRAM = ("-W", "ignore", "-m", "benchmarks.queue_runs.pyg_queue")


class WorkerLost(RuntimeError):
    """A worker process has ended, or did not answer in time and was ended."""


class PyGWorker:
    """A worker process; :meth:`train` blocks until its task is done, or the worker is lost."""

    def __init__(
        self, device: str, environment: Mapping[str, str] | None = None, program: Sequence[str] = PROGRAM
    ) -> None:
        self._begin = time.perf_counter()
        self._lines: queue.Queue[str] = queue.Queue()
        self.start_seconds = 0.0
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, *program, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
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
        self._reader.join(GRACE)
        assert self._process.stdout is not None
        self._process.stdout.close()


class PyGWorkers:
    """Workers that stay from one queue to the next; one that has ended is replaced."""

    def __init__(self, count: int, device: str, environment: Mapping[str, str] | None = None) -> None:
        self._count, self._device, self._environment = count, device, environment
        self._workers: list[PyGWorker] = []

    def ready(self) -> list[PyGWorker]:
        """All of them, with nothing left of former queues."""
        for worker in self._workers:
            with suppress(WorkerLost):
                worker.train({"clear": True}, CLEAR_SECONDS)
        for worker in [worker for worker in self._workers if not worker.alive]:
            worker.stop()
            self._workers.remove(worker)
        made = [PyGWorker(self._device, self._environment) for _ in range(self._count - len(self._workers))]
        self._workers += made
        for worker in made:  # they start side by side
            worker.wait_ready()
        return list(self._workers)

    def stop(self) -> None:
        """End all."""
        for worker in self._workers:
            worker.stop()


def warm_up(workers: Sequence[PyGWorker], tasks: Sequence[Settings], seconds: float) -> list[PyGWorker]:
    """Let every worker train every one of ``tasks``, for ``seconds`` at most; the workers that are there afterwards.

    Each begins with another one. What runs out of memory here is not counted.
    """
    end = time.perf_counter() + seconds

    def work(place: int) -> None:
        first = place * len(tasks) // len(workers)
        for settings in [*tasks[first:], *tasks[:first]]:
            left = end - time.perf_counter()
            if left <= 0:
                return
            try:
                workers[place].train(settings, left + GRACE)
            except WorkerLost:
                return

    _on_threads(work, len(workers))
    return [worker for worker in workers if worker.alive]


def _on_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_in_order(
    name: str, workers: Sequence[PyGWorker], tasks: Mapping[str, Settings], seconds: float = LONGEST
) -> tuple[Simulation, dict[str, Any]]:
    """Every task on the next free worker, in order; when each ran, and what went wrong.

    A worker that is lost takes no further task. TimeoutError if ``seconds`` were not enough for all of them.
    """
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
                said, lost = workers[place].train(settings, seconds - start), False
            except WorkerLost as error:
                said, lost = {"error": str(error)}, True
            rows.append((label, place, start, time.perf_counter() - begin, said))
            if lost:
                return

    _on_threads(work, len(workers))
    if time.perf_counter() - begin >= seconds:
        raise TimeoutError(f"{seconds:.0f} s were not enough for {name}: {len(rows)} of {len(tasks)} tasks were begun")
    while not waiting.empty():
        rows.append((waiting.get()[0], 0, 0.0, 0.0, {"error": "no PyG worker was left"}))
    done = [row for row in rows if "error" not in row[4]]
    runs = tuple(TaskRun(label, label, 0.0, start, end) for label, _, start, end, _ in done)
    groups = tuple(SimulatedGroup(label, "device", place, (label,), said.get("peak_bytes", 0), start, end, "is next")
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
