"""One task in a process of its own, for ``benchmarks.suites.heterogeneous``: prepares, says so, waits, trains, reports.

Reads one line of JSON (shape, scale, device, task settings, epochs, warm-up), writes ``ready``, reads ``go``, trains,
and writes one line of JSON with the seconds it took.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.timing import synchronize
from benchmarks.harness.weft_side import group_epoch
from weft.core.task import Task


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
