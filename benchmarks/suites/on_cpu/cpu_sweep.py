"""A sweep of Cora's GCN on a CPU: Weft trains all members together, PyG one after another, in one run.

    python -m benchmarks.suites.on_cpu.cpu_sweep [--data DIR] [--out cpu_sweep.json]

16 tasks (2 widths of the hidden layer, 2 learning rates, 4 seeds; the other settings of the original paper). The time
of a side is everything from the graph in memory to the last trained model. Both sides evaluate after every epoch and
keep the test accuracy of the best validation epoch; accuracies are compared setting by setting over the seeds.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import Tensor

import weft
from benchmarks.baselines.epochs import dense_features
from benchmarks.baselines.pyg_training import train_pyg
from benchmarks.harness.recorder import Recorder, common_arguments, find, print_table
from benchmarks.suites.on_cpu.cpu import DATA, THREADS, faster_threads, find_graph
from weft.core.sweep import Sweep
from weft.graph.graph import Graph
from weft.runtime.device.process import cpu_threads

SIDES = ("weft", "pyg")
VARIED = ("hidden", "lr")


def paper_sweep(graph: Graph, epochs: int, seeds: int, hidden: tuple[int, ...] = (16, 32)) -> Sweep:
    """Kipf and Welling's GCN over widths, rates and seeds."""
    return Sweep(
        graph=graph, model="gcn", dropout=0.5, input_dropout=0.5, weight_decay=5e-4, decay="first", epochs=epochs,
        hidden=list(hidden), lr=[0.005, 0.01], seed=range(seeds),
    )  # fmt: skip


def train_weft(sweep: Sweep) -> list[float]:
    """Test accuracies of the members, trained together."""
    result = weft.run(sweep, device="cpu", progress=False)
    return [float(member.metrics["test_accuracy"]) for member in result]


def train_loop(sweep: Sweep, graph: Graph, x: Tensor, edge_index: Tensor) -> list[float]:
    """Test accuracies of the members, trained by PyG one after another."""
    return [train_pyg(task, graph, x, edge_index).test for task in sweep.tasks()]


def measure(
    side: str, sweep: Sweep, graph: Graph, x: Tensor, edge_index: Tensor, threads: int | None = None
) -> dict[str, Any]:
    """Seconds of the whole sweep on one side, and the accuracy of every member; ``threads``: PyG's."""
    start = time.perf_counter()
    with cpu_threads(None if side == "weft" else threads):
        tests = train_weft(sweep) if side == "weft" else train_loop(sweep, graph, x, edge_index)
    seconds = time.perf_counter() - start
    return {"train_seconds": round(seconds, 4), "mean_test": mean(tests), "tests": tests}


def run_all(recorder: Recorder, graph: Graph, args: Namespace) -> Sweep:
    """Warm both sides, then alternate between them."""
    x, edge_index = dense_features(graph), graph.edge_index()
    recorder.about["graph"] = {"name": graph.name, "nodes": graph.num_nodes, "edges": graph.num_edges}
    threads = recorder.prepare("threads of PyG", lambda: faster_threads(graph, x, edge_index, torch.get_num_threads()))
    recorder.about["pyg_threads"] = threads
    warm = paper_sweep(graph, min(args.epochs, 3), 1)
    sweep = paper_sweep(graph, args.epochs, args.seeds)
    for turn in range(args.runs + 1):
        for side in SIDES:
            key = {"side": side, "turn": turn or "warm-up"}
            recorder.cell(key, lambda s=side, w=sweep if turn else warm: measure(s, w, graph, x, edge_index, threads))
    return sweep


def times(cells: list[dict[str, Any]]) -> dict[str, float | None]:
    """Median seconds of both sides and their ratio."""
    found: dict[str, float | None] = {}
    for side in SIDES:
        taken = [
            c["train_seconds"] for c in cells if c["side"] == side and c["turn"] != "warm-up" and c["status"] == "ok"
        ]
        found[side] = median(taken) if taken else None
    both = found["weft"] and found["pyg"]
    return {**found, "ratio": found["pyg"] / found["weft"] if both else None}


def accuracies(cells: list[dict[str, Any]], sweep: Sweep) -> list[dict[str, Any]]:
    """Per setting: mean test accuracy of both sides over the seeds, and the difference in standard errors."""
    first = {side: find(cells, side=side, turn=1) for side in SIDES}
    if None in first.values():
        return []
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, task in enumerate(sweep.tasks()):
        places.setdefault(tuple(getattr(task, name) for name in VARIED), []).append(place)
    rows = []
    for values, chosen in places.items():
        tests = {side: [100 * first[side]["tests"][place] for place in chosen] for side in SIDES}
        rows.append({**dict(zip(VARIED, values, strict=True)), **compare(tests["weft"], tests["pyg"])})
    return rows


def compare(ours: list[float], theirs: list[float]) -> dict[str, float | None]:
    """Two means and their difference in standard errors of it."""
    gap = mean(ours) - mean(theirs)
    if len(ours) < 2 or len(theirs) < 2:
        return {"weft": mean(ours), "pyg": mean(theirs), "difference": None}
    error = math.sqrt(stdev(ours) ** 2 / len(ours) + stdev(theirs) ** 2 / len(theirs))
    return {
        "weft": mean(ours),
        "pyg": mean(theirs),
        "difference": gap / error if error else 0.0 if gap == 0 else math.inf,
    }


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.set_defaults(device="cpu")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with cora.npz")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=4, help="of each of the four settings")
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Run both sides and print the ratio and the accuracies."""
    args = arguments()
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    recorder = Recorder("cpu_sweep", args)
    graph = recorder.prepare("graph", lambda: find_graph(args.data))
    if graph is None:
        return
    sweep = run_all(recorder, graph, args)
    seconds, rows = times(recorder.cells), accuracies(recorder.cells, sweep)
    recorder.save(summary={"tasks": len(sweep), **seconds, "accuracies": rows})
    print_table(
        ["tasks", "Weft s", "PyG s", "PyG/Weft"], [[len(sweep), seconds["weft"], seconds["pyg"], seconds["ratio"]]]
    )
    print_table(
        ["hidden", "lr", "Weft %", "PyG %", "difference in standard errors"], [list(row.values()) for row in rows]
    )


if __name__ == "__main__":
    main()
