"""Cora's GCN on a CPU, 200 epochs: Weft against PyG in one run.

    python -m benchmarks.suites.cpu [--data DIR] [--out cpu.json]

The original paper's settings (hidden 16, dropout 0.5 on the input and the hidden layer, Adam 0.01, decay 5e-4
on the first layer). PyG trains on dense features as its examples do; Weft keeps them sparse. Runs alternate
between the sides; the time of a run is everything from the graph in memory to the trained model. Each side gets its
best number of threads: Weft's plan chooses for itself, PyG's is tried out before.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines.epochs import dense_features, train_pyg
from benchmarks.harness.graphs import read_graph, row_normalised
from benchmarks.harness.recorder import Recorder, common_arguments
from weft.core.task import Task
from weft.engine.run import run as weft_run
from weft.graph.catalog.names import data_folders, load
from weft.graph.graph import Graph
from weft.runtime.device.process import cpu_threads

THREADS = 2
DATA = data_folders()[0]  # $WEFT_DATA, or ~/.cache/weft/data


def paper_task(graph: Graph, epochs: int, eval_every: int, seed: int = 0) -> Task:
    """Kipf and Welling's GCN."""
    return Task(
        graph=graph, model="gcn", hidden=16, dropout=0.5, input_dropout=0.5, lr=0.01, weight_decay=5e-4,
        decay="first", epochs=epochs, eval_every=eval_every, seed=seed,
    )  # fmt: skip


def faster_threads(graph: Graph, x: torch.Tensor, edge_index: torch.Tensor, most: int, epochs: int = 10) -> int:
    """The number of threads, up to ``most``, with which PyG trains a few epochs of the task fastest; best of two."""
    task, seconds = paper_task(graph, epochs, 1), {}
    for count in range(1, most + 1):
        with cpu_threads(count):
            seconds[count] = min(train_pyg(task, graph, x, edge_index).seconds for _ in range(2))
    return min(seconds, key=seconds.__getitem__)


def measure(
    side: str, graph: Graph, x: torch.Tensor, edge_index: torch.Tensor, task: Task, threads: int | None = None
) -> dict[str, Any]:
    """Seconds and test accuracy of one training; ``threads``: PyG's."""
    start = time.perf_counter()
    if side == "weft":
        metrics = weft_run(task, device="cpu", progress=False).metrics
        test = metrics["test_accuracy"]
    else:
        with cpu_threads(threads):
            test = train_pyg(task, graph, x, edge_index).test
    return {"train_seconds": round(time.perf_counter() - start, 4), "test_accuracy": test}


def run_all(recorder: Recorder, graph: Graph, args: Namespace) -> None:
    """Warm both sides, then alternate between them."""
    x, edge_index = dense_features(graph), graph.edge_index()
    recorder.about["graph"] = {"name": graph.name, "nodes": graph.num_nodes, "edges": graph.num_edges}
    threads = recorder.prepare("threads of PyG", lambda: faster_threads(graph, x, edge_index, torch.get_num_threads()))
    recorder.about["pyg_threads"] = threads
    for evaluated, every in (("each epoch", 1), ("at the end", args.epochs)):
        for turn in range(args.runs + 1):
            for side in ("weft", "pyg"):
                epochs = args.epochs if turn else min(args.epochs, 5)
                task = paper_task(graph, epochs, min(every, epochs), seed=turn)
                key = {"evaluated": evaluated, "side": side, "turn": turn or "warm-up"}
                recorder.cell(key, lambda s=side, t=task: measure(s, graph, x, edge_index, t, threads))


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.set_defaults(device="cpu")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with cora.npz")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Run both sides and print the ratio."""
    from benchmarks.report import runs

    args = arguments()
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    recorder = Recorder("cpu", args)
    embedded = not (args.data / "cora.npz").exists()
    make = lambda: row_normalised(load("demo")) if embedded else read_graph(args.data, "cora")  # noqa: E731
    graph = recorder.prepare("graph", make)
    if graph is not None:
        run_all(recorder, graph, args)
    recorder.print_tables(runs.cpu)


if __name__ == "__main__":
    main()
