"""Several tasks in processes of their own, started together, optionally under NVIDIA's Multi-Process Service."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.timing import synchronize
from benchmarks.harness.weft_side import group_epoch
from weft.core.task import Task


def train_together(requests: Sequence[dict[str, Any]], env: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """A process per request (shape, scale, device, task settings, epochs, warm-up), all told to train at once.

    The makespan and what each of them says. Preparing and training may take ``seconds`` each; all end with this call.
    """
    context, pipes, processes = get_context("spawn"), [], []
    try:
        with patch.dict(os.environ, env):
            for request in requests:
                here, there = context.Pipe()
                processes.append(context.Process(target=work, args=(there, request), daemon=True))
                processes[-1].start()
                there.close()
                pipes.append(here)
        start = time.perf_counter()
        answers(pipes, seconds, "to prepare")
        prepared = time.perf_counter() - start
        start = time.perf_counter()
        for pipe in pipes:
            pipe.send("go")
        found = answers(pipes, seconds, "to train")
        return {"makespan": time.perf_counter() - start, "prepare_seconds": prepared, "workers": found}
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def answers(pipes: Sequence[Connection], seconds: float, what: str) -> list[Any]:
    """One message of every process, in whatever order they come; a RuntimeError of one that failed."""
    deadline, found = time.monotonic() + seconds, []
    for place, pipe in enumerate(pipes):
        if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
            raise TimeoutError(f"{len(pipes) - place} workers took over {seconds:.0f} s {what}")
        said: Any = {"error": "without a word"}
        with suppress(EOFError):
            said = pipe.recv()
        if "error" in said:
            raise RuntimeError(f"worker {place} ended: {said['error']}")
        found.append(said)
    return found


def work(pipe: Connection, request: dict[str, Any]) -> None:
    """The process: record an epoch of the task, warm up, say so, and train when told to."""
    try:
        device = torch.device(request["device"])
        torch.set_num_threads(1)  # the workers share the processor; on a GPU they hardly use it
        graph = make_graph(request["shape"], device, request["scale"])
        weft = group_epoch([Task(graph=graph, **request["task"])], graph)
        for _ in range(request["warmup"]):
            weft.train()
        synchronize(device)
        pipe.send({"ready": True})
        pipe.recv()
        start = time.perf_counter()
        for _ in range(request["epochs"]):
            weft.train()
        synchronize(device)
        pipe.send({"seconds": time.perf_counter() - start, "recorded": weft.recorded})
    except Exception as error:  # whatever it is, the other side says it
        pipe.send({"error": f"{type(error).__name__}: {error}"})
