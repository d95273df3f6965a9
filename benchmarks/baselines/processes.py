"""Several tasks in processes of their own, started together, optionally under NVIDIA's Multi-Process Service.

:class:`Workers` starts the processes, talks to them through pipes, and ends them whatever happens. As a program this
module is such a process: it reads one line of JSON (shape, scale, device, task settings, epochs, warm-up), writes
``ready``, reads ``go``, trains, and writes one line of JSON with the seconds that training took.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.timing import synchronize
from benchmarks.harness.weft_side import group_epoch
from weft.core.task import Task


class Workers:
    """One ``benchmarks.baselines.processes`` a request."""

    def __init__(self, requests: Sequence[dict[str, Any]], env: dict[str, str] | None = None) -> None:
        environment = {**(env or os.environ), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        # Files, closed on leaving: a pipe that nobody reads would fill up.
        self._errors = [tempfile.TemporaryFile("w+") for _ in requests]  # noqa: SIM115
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "benchmarks.baselines.processes"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
            for errors in self._errors
        ]
        for process, request in zip(self._processes, requests, strict=True):
            self._send(process, json.dumps(request))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):
                    pipe.close()
        for errors in self._errors:
            errors.close()

    def run(self, prepare_seconds: float, train_seconds: float) -> dict[str, Any]:
        """Wait until all are ready, start them at once, and give the makespan and what each of them says."""
        start = time.perf_counter()
        self._lines(prepare_seconds, "to prepare")
        prepared = time.perf_counter() - start
        start = time.perf_counter()
        for process in self._processes:
            self._send(process, "go")
        answers = [json.loads(line) for line in self._lines(train_seconds, "to train")]
        return {"makespan": time.perf_counter() - start, "prepare_seconds": prepared, "workers": answers}

    @staticmethod
    def _send(process: subprocess.Popen[str], line: str) -> None:
        with suppress(BrokenPipeError):  # it has ended; the reader says why
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def _lines(self, seconds: float, what: str) -> list[str]:
        """One line of every process."""
        found: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for place, process in enumerate(self._processes):
                selector.register(process.stdout, selectors.EVENT_READ, place)
            while len(found) < len(self._processes):
                ready = selector.select(max(deadline - time.monotonic(), 0.0))
                if not ready:
                    raise TimeoutError(f"{len(self._processes) - len(found)} workers took over {seconds:.0f} s {what}")
                for key, _ in ready:
                    found[key.data] = self._line(key.data)
                    selector.unregister(key.fileobj)
        return [found[place] for place in sorted(found)]

    def _line(self, place: int) -> str:
        line = self._processes[place].stdout.readline()
        if line:
            return line
        self._processes[place].wait()
        self._errors[place].seek(0)
        words = self._errors[place].read().strip().splitlines()
        raise RuntimeError(f"worker {place} ended: {words[-1] if words else 'without a word'}")


def prepare(request: dict[str, Any]) -> tuple[Any, torch.device]:
    """The recorded epoch of the task, warm."""
    device = torch.device(request["device"])
    torch.set_num_threads(1)  # the workers share the processor; on a GPU they hardly use it
    graph = make_graph(request["shape"], device, request["scale"])
    weft = group_epoch([Task(graph=graph, **request["task"])], graph)
    for _ in range(request["warmup"]):
        weft.train()
    synchronize(device)
    return weft, device


def train(weft: Any, device: torch.device, epochs: int) -> dict[str, Any]:
    """``epochs`` in a row and their seconds."""
    start = time.perf_counter()
    for _ in range(epochs):
        weft.train()
    synchronize(device)
    return {"seconds": time.perf_counter() - start, "recorded": weft.recorded}


def main() -> None:
    """One request, from the standard input."""
    request = json.loads(sys.stdin.readline())
    weft, device = prepare(request)
    print("ready", flush=True)
    if sys.stdin.readline().strip() != "go":
        return
    print(json.dumps(train(weft, device, request["epochs"])), flush=True)


if __name__ == "__main__":
    main()
