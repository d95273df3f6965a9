"""Try to crash the workers of a server: many short trainings whose starts overlap with what is made ready for the next.

    python -m benchmarks.queue_runs.crash_stress --out stress.json      meant to take some 90 s on an H200
    python -m benchmarks.queue_runs.crash_stress --device cpu --workers 2 --reserved-gib 2 --nodes 300 --seconds 10

In one of some 160 to 500 trainings of ``benchmarks.suites.queues`` on an H200 a worker ended with a segmentation fault,
by a number that torch freed twice (``weft.engine.graphs.unused_bytes``). It comes to light after some hundred
trainings of one process, which take a minute here. ``--check-memory`` lets Python's allocator check each object that is
freed, and whether its thread may touch objects at all; it did not find that fault, since an object that was freed then
looks as if it were never to be.

What crosses threads in a worker happens while a training starts: its step is warmed up and captured, and the graph, the
initial weights and the pinned features of the next one are made ready beside it. So here trainings are all start (few
epochs, half of them gin), the next one is announced as soon as one begins, workers keep so little that graphs come and
go, and files of graphs get another time every few seconds, so that they are read, pinned and fetched anew.

Most of the time workers are driven directly, which leaves no time between two trainings. Then whole queues run by the
server's policies, with plans and byte caps as in the suite. At the end: trainings, workers lost, and the log of every
crash with the stacks of all threads, in Python and in libraries. The exit code is 1 if a worker was lost or a training
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.graphs import make_graph
from benchmarks.queue_runs.queue_server import QueueServer
from weft.core.models import BUILT_IN
from weft.graph.catalog.shapes import find as find_shape
from weft.serve.worker import NATIVE_STACKS
from weft.serve.worker_pool import PLANNER

GIB = 1 << 30
SHAPES = ("cora", "pubmed", "proteins", "artist", "soc-blog", "dd", "ovcar-8h")
MOST_NODES = 400_000  # of a shape: the larger ones take their time to copy, and are not kept
MODELS = ("gin", "gin", "gin", "gcn", "sage", "gat")
POLICIES = ("lmcf", "backfill", "mps")
DIRECT = 0.65  # of the time
TOUCH_SECONDS = 3.0
CRASHED = ("Fatal Python error", "Segmentation fault")
Settings = dict[str, Any]


def write_graphs(folder: Path, device: torch.device, nodes: int) -> list[Path]:
    """The shapes, with at most ``nodes`` nodes each, as folders that processes map."""
    found = []
    for shape in SHAPES:
        made = make_graph(shape, device, min(1.0, nodes / find_shape(shape).num_nodes)).to("cpu")
        made.save(folder / "graphs" / shape)
        found.append(folder / "graphs" / shape)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def trainings(graphs: Sequence[Path], seed: int, epochs: int) -> Iterator[Settings]:
    """Trainings without end, drawn by ``seed``; few kinds, so that kernels are compiled once."""
    draw = random.Random(seed)
    while True:
        model = draw.choice(MODELS)
        heads = {"heads": 4, "out_heads": 4} if BUILT_IN[model].has_heads else {}
        sizes = {"layers": draw.choice((4, 5)), "hidden": 64, "epochs": draw.randint(1, epochs)}
        about = {"graph": str(draw.choice(graphs)), "model": model, "seed": draw.randrange(1 << 20)}
        yield {**about, **sizes, **heads, "dropout": 0.0, "lr": 0.01}


def touch(graph: Path) -> None:
    """Let the files of a graph look as if they had been written anew."""
    for place in graph.iterdir():
        os.utime(place)


class Direct:
    """Sends trainings to the workers of ``server`` as fast as they take them, each with the next one announced."""

    def __init__(self, server: QueueServer, folder: Path, graphs: Sequence[Path], args: argparse.Namespace) -> None:
        self._server, self._folder, self._graphs, self._args = server, folder, graphs, args
        self._next: dict[str, Settings] = {}  # by worker: what it was told to make ready
        self._made = trainings(graphs, args.seed, args.epochs)
        self.begun = 0

    def run(self, seconds: float) -> None:
        """Until ``seconds`` are over, and the last training is."""
        end, again = time.monotonic() + seconds, time.monotonic() + TOUCH_SECONDS
        draw = random.Random(self._args.seed)
        while time.monotonic() < end:
            if time.monotonic() > again:
                touch(draw.choice(self._graphs))
                again += TOUCH_SECONDS
            for worker in self._workers():
                if worker.idle:
                    self._send(worker)
            time.sleep(0.002)
        self._server._until(lambda: not any(one.group for one in self._workers()), 120.0, "for the last trainings")

    def _workers(self) -> list[Any]:
        return [one for name, one in list(self._server.supervisor.pool.workers.items()) if name != PLANNER]

    def _send(self, worker: Any) -> None:
        settings = self._next.get(worker.name) or next(self._made)
        self._next[worker.name] = later = next(self._made)
        self.begun += 1
        worker.group = f"stress-{self.begun}"
        limits = {"budget": int(self._args.budget_gib * GIB / self._args.workers), "checkpoint_every": 600.0}
        place = self._folder / "direct" / worker.group
        worker.send("run", group=worker.group, tasks=[{**settings, "name": worker.group}], out=str(place), **limits)
        worker.send("prefetch", graph=later["graph"], weights=None, tasks=[{**later, "name": "next"}], folders=[])


def run_queues(server: QueueServer, graphs: Sequence[Path], args: argparse.Namespace, end: float) -> Mapping[str, Any]:
    """Queues by one policy after another until ``end``: how many were done, and what failed or was tried again."""
    made, done, failed, again = trainings(graphs, args.seed + 1, args.epochs), 0, {}, {}
    for place in range(1000):
        if place and time.monotonic() > end:
            break
        run = server.run(POLICIES[place % len(POLICIES)], {f"{place}-{i}": next(made) for i in range(args.tasks)})
        done += len(run.details)
        failed |= run.failed
        again |= run.tried_again
        touch(graphs[place % len(graphs)])
    return {"done": done, "failed": failed, "tried_again": again}


def logs(folder: Path, words: Sequence[str]) -> dict[str, str]:
    """The ends of the logs in which one of ``words`` stands."""
    found = {}
    for path in sorted(folder.rglob("log.txt")) + sorted(folder.rglob("workers.log")):
        text = path.read_text(encoding="utf-8", errors="replace")
        places = [text.find(word) for word in words if word in text]
        if places:
            found[str(path.relative_to(folder))] = text[min(places) :][:60_000]
    return found


def stress(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All of it; what came of it as plain data."""
    graphs = write_graphs(folder, torch.device(args.device), args.nodes)
    sizes = int(args.budget_gib * GIB), int(args.reserved_gib * GIB)
    with QueueServer(folder, args.device, args.workers, *sizes) as server:
        kinds = {(one["graph"], one["model"]): one for one, _ in zip(trainings(graphs, 0, 1), range(200), strict=False)}
        if args.device.startswith("cuda"):
            server.warm_up(list(kinds.values())[: args.warm], args.seconds)
        begin = time.monotonic()
        direct = Direct(server, folder, graphs, args)
        direct.run(DIRECT * args.seconds)
        queues = run_queues(server, graphs, args, begin + args.seconds)
        lost = server.supervisor.counters.workers_lost
    return {
        "trainings": direct.begun + server._warmed + queues["done"],
        "seconds": round(time.monotonic() - begin, 1),
        "workers_lost": lost,
        "failed": queues["failed"],
        "tried_again": queues["tried_again"],
        "crashes": logs(folder, CRASHED),
        "errors": logs(folder, ["Traceback"]),
    }


def main() -> None:
    """Print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=75.0, help="of trainings; starting and warming up come on top")
    parser.add_argument("--nodes", type=int, default=MOST_NODES, help="at most so many of a shape")
    parser.add_argument("--epochs", type=int, default=4, help="at most so many of a training")
    parser.add_argument("--tasks", type=int, default=30, help="of each queue")
    parser.add_argument("--warm", type=int, default=12, help="trainings that every worker begins with on a GPU")
    parser.add_argument("--budget-gib", type=float, default=26.0)
    parser.add_argument("--reserved-gib", type=float, default=6.0)
    parser.add_argument("--check-memory", action="store_true", help="workers run with PYTHONMALLOC=debug")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write what came of it to this JSON file")
    args = parser.parse_args()
    os.environ[NATIVE_STACKS] = "1"  # workers inherit it
    if args.check_memory:
        os.environ["PYTHONMALLOC"] = "debug"
    with tempfile.TemporaryDirectory(prefix="weft-stress-", ignore_cleanup_errors=True) as folder:
        found = stress(args, Path(folder))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    for name in ("crashes", "errors"):
        for path, text in found[name].items():
            print(f"---- {name}: {path}\n{text}\n")
    for task, why in {**found["failed"], **found["tried_again"]}.items():
        print(f"---- {task}: {why[:2000]}\n")
    print(f"{found['trainings']} trainings in {found['seconds']} s, {found['workers_lost']} workers lost, ", end="")
    print(f"{len(found['crashes'])} crashes in logs, {len(found['failed'])} failed, {len(found['tried_again'])} again")
    sys.exit(any(found[name] for name in ("workers_lost", "failed", "crashes", "errors")))


if __name__ == "__main__":
    main()
