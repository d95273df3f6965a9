"""How long a resident model takes to answer for ten nodes: at the pipe of its worker, and over HTTP.

    python -m benchmarks.queue_runs.predict --out predict.json         on a GPU: the pipe, alone and beside a training
    python -m benchmarks.queue_runs.predict --only http                on a CPU: a server on loopback, on the demo graph

At the pipe: a worker as `weft serve` starts it has a SAGE of three layers of 256 on the products shape (`--graph`); its
weights were drawn, not trained; the time is from writing a request to reading its answer. Requests are for ten
nodes each, drawn at random: *exact* as a user sends them (looked up: the whole graph is computed when the model is
loaded), *neighbourhoods* with all neighbours within three hops computed for every request, *sampled* with a fan-out of
15, 10 and 5. The training is in a worker of its own, with
NVIDIA's MPS as a server has it (`--only mps`), and without. Over HTTP every request has a connection of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

import weft
from benchmarks.harness.recorder import ROOT, Recorder, common_arguments, listed
from weft.graph.catalog import names as catalog
from weft.serve.worker_pool import MPS

TARGET_MS = 20.0
KINDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "neighbourhoods": {"fanout": [-1, -1, -1]},
    "sampled": {"fanout": [15, 10, 5]},
}
MODEL = {"model": "sage", "hidden": 256, "layers": 3}


class PipedWorker:
    """A worker process, with JSON lines over its pipes as a server sends them."""

    def __init__(self, device: str, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "weft.serve.worker", "--device", device, "--parent", str(os.getpid())]
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        env = {**os.environ, "PYTHONPATH": paths, **environment}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    def send(self, do: str, **data: Any) -> None:
        """A message to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **data}).encode() + b"\n")
        self._process.stdin.flush()

    def until(self, *kinds: str) -> dict[str, Any]:
        """The next message of one of these kinds, of events the kind of event."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message: dict[str, Any] = json.loads(line)
            kind = message["event"]["event"] if message["say"] == "event" else message["say"]
            if kind in kinds:
                return message
            if kind == "done":
                raise RuntimeError(str(message)[:500])
        raise RuntimeError("the worker has ended")

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


@contextmanager
def worker_on(device: str, environment: Mapping[str, str]) -> Iterator[PipedWorker]:
    """A worker, ended afterwards."""
    worker = PipedWorker(device, environment)
    try:
        worker.until("ready")
        yield worker
    finally:
        worker.end()


def figures(waits: Sequence[float], answered: Sequence[str]) -> dict[str, Any]:
    """Median and 99th percentile in milliseconds, of all and by how requests were answered."""
    of: dict[str, list[float]] = defaultdict(list)
    for wait, how in zip(waits, answered, strict=True):
        of[how].append(wait)
    found: dict[str, Any] = {}
    for how, some in {"": list(waits), **of}.items():
        some = sorted(some)
        end = f" of {len(some)} by {how}" if how else ""
        found |= {f"p50_ms{end}": round(some[len(some) // 2], 2), f"p99_ms{end}": round(some[int(0.99 * len(some))], 2)}
    return found


def measured(ask: Callable[[list[int]], Mapping[str, Any]], nodes: int, count: int) -> dict[str, Any]:
    """The figures of ``count`` requests, each for ten of ``nodes`` nodes."""
    draw, waits, answered = random.Random(0), [], []
    for _ in range(count):
        ids = [draw.randrange(nodes) for _ in range(10)]
        begin = time.perf_counter()
        answer = ask(ids)
        waits.append(1e3 * (time.perf_counter() - begin))
        if len(answer.get("logits", ())) != 10:
            raise RuntimeError(str(answer)[:300])
        answered.append(answer["computed"])
    return figures(waits, answered)


def at_the_pipe(args: Any, recorder: Recorder, environment: Mapping[str, str], part: str) -> None:
    """The cells of a resident model on ``args.device``, alone and beside a training."""
    stats, device = catalog.stats(args.graph), args.device if ":" in args.device else f"{args.device}:0"
    device = "cpu" if args.device == "cpu" else device
    task = {"graph": args.graph, **MODEL, "name": "m"}

    def ask(worker: PipedWorker, request: Mapping[str, Any]) -> Callable[[list[int]], Mapping[str, Any]]:
        def asked(nodes: list[int]) -> Mapping[str, Any]:
            worker.send("predict", group="m", id=1, nodes=nodes, **request)
            return worker.until("answer")

        return asked

    with tempfile.TemporaryDirectory() as folder, worker_on(device, environment) as worker:
        weights = Path(folder) / "model.safetensors"
        built = weft.nn.build("sage", stats.num_features, stats.num_classes, hidden=256, layers=3)
        save_file(built.state_dict(), weights)
        begin = time.perf_counter()
        where = {"out": folder, "budget": args.budget_gib << 30, "names": {"m": None}}
        worker.send("infer", group="m", task=task, weights=str(weights), nodes=None, resident=600.0, **where)
        worker.until("resident")
        loaded = round(time.perf_counter() - begin, 1)

        def cells(beside: str) -> None:
            for kind, request in ((kind, KINDS[kind]) for kind in args.requests):
                key = {"part": part, "beside": beside, "requests": kind}
                work = lambda request=request: measured(ask(worker, request), stats.num_nodes, args.count)  # noqa: E731
                recorder.cell(key, lambda work=work: {**work(), "load_seconds": loaded}, free=False)

        cells("nothing")
        with worker_on(device, environment) as trainer:
            tasks = [{**task, "name": "t", "epochs": 100_000, "mode": "full"}]
            trainer.send("run", group="t", tasks=tasks, plan=None, out=f"{folder}/t", names={"t": None})
            trainer.until("progress")
            cells("training")


def over_http(args: Any, recorder: Recorder) -> None:
    """The cells of a server on loopback, whose training is a GCN on the demo graph."""
    from benchmarks.queue_runs.load import SMALL, served, until

    with served("--workers", "2") as server:
        [task] = server.submit([SMALL])
        until(lambda: server.get(f"/api/tasks/{task['id']}")["state"] == "done", 60.0)

        def ask(nodes: list[int]) -> Mapping[str, Any]:
            body = json.dumps({"task": task["id"], "nodes": nodes}).encode()
            return json.loads(server.ask("POST", "/api/predict", body)[1])

        ask([0])  # loads it
        nodes = weft.load("demo").num_nodes
        recorder.cell({"part": "http", "beside": "nothing"}, lambda: measured(ask, nodes, args.count))
        server.submit([{**SMALL, "epochs": 1_000_000}])
        until(lambda: len(server.get("/api/state")["running"]) == 2, 30.0)
        recorder.cell({"part": "http", "beside": "training"}, lambda: measured(ask, nodes, args.count))


def main() -> None:
    """Run the parts and print their figures."""
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--only", type=listed, default=["pipe", "mps"])
    parser.add_argument("--requests", type=listed, default=list(KINDS))
    parser.add_argument("--graph", default="shape:ogbn-products")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--budget-gib", type=int, default=48)
    args = parser.parse_args()
    recorder = Recorder("predict", args)
    if "pipe" in args.only:
        at_the_pipe(args, recorder, {}, "pipe")
    service = MPS([args.device], 2)
    if "mps" in args.only and service.start():
        try:
            at_the_pipe(args, recorder, service.environment, "pipe, MPS")
        finally:
            service.stop()
    if "http" in args.only:
        over_http(args, recorder)
    recorder.save()
    print("\n| part | beside | requests | p50 ms | p99 ms | below 20 ms |\n|---|---|---|---|---|---|")
    for cell in recorder.cells:
        if "p99_ms" in cell:
            what = f"{cell['part']} | {cell['beside']} | {cell.get('requests', 'exact')}"
            below = "yes" if cell["p99_ms"] < TARGET_MS else "NO"
            print(f"| {what} | {cell['p50_ms']:g} | {cell['p99_ms']:g} | {below} |")
            print("".join(f"|  |  | {name} | {cell[name]:g} | | |\n" for name in cell if " by " in name), end="")


if __name__ == "__main__":
    main()
