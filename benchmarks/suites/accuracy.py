"""Test accuracy of Weft beside PyG trained the same way: four models on the graphs of a folder, ten seeds.

    python -m benchmarks.suites.accuracy --data DIR --out accuracy.json

Same architecture, initial distributions, optimizer, epochs, dropout and selection (test accuracy of the epoch
with the best validation accuracy). Each training is a cell of its own; ``--resume`` continues an interrupted run. The
last column is the difference of the means in standard errors of it.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.baselines.epochs import dense_features, train_pyg
from benchmarks.harness.graphs import read_graph
from benchmarks.harness.recorder import Recorder, common_arguments, listed, print_table
from weft.core.task import Task
from weft.engine.run import run as weft_run
from weft.graph.graph import Graph

GRAPHS = "cora,citeseer,facebook,squirrel,twitch_de"
COMMON = {"layers": 2, "weight_decay": 5e-4}
SETTINGS: dict[str, dict[str, Any]] = {
    # The papers' settings for citation graphs. GIN's sums grow with the degree: without a norm it learns nothing
    # on squirrel (20 %), and with batch norm little from few labels (citeseer 41 %, with layer norm 63 %).
    "gcn": {"hidden": 16, "dropout": 0.5, "input_dropout": 0.5, "lr": 0.01, "decay": "first", "epochs": 200},
    "sage": {"hidden": 64, "dropout": 0.5, "input_dropout": 0.5, "lr": 0.01, "epochs": 200},
    "gin": {"hidden": 64, "dropout": 0.5, "input_dropout": 0.5, "lr": 0.01, "norm": "layer", "epochs": 200},
    "gat": {
        "hidden": 64,
        "heads": 8,
        "out_heads": 1,
        "dropout": 0.6,
        "input_dropout": 0.6,
        "lr": 0.005,
        "epochs": 500,
        "patience": 100,
    },
}
SIDES = ("weft", "pyg")


def settings_of(model: str, epochs: int | None) -> dict[str, Any]:
    """The settings of a model, with fewer epochs to try this out."""
    chosen = {**COMMON, **SETTINGS[model]}
    return chosen if epochs is None else {**chosen, "epochs": min(epochs, chosen["epochs"])}


def train(side: str, graph: Graph, model: str, settings: dict[str, Any], seed: int, pyg: tuple) -> dict[str, Any]:
    """One training of one side."""
    task = Task(graph=graph, model=model, seed=seed, **settings)
    start = time.perf_counter()
    if side == "weft":
        metrics = weft_run(task, device=graph.device, progress=False).metrics
        found = {"val": metrics["val_accuracy"], "test": metrics["test_accuracy"], "epochs": metrics["epochs_run"]}
    else:
        outcome = train_pyg(task, graph, *pyg)
        found = {"val": outcome.val, "test": outcome.test, "epochs": outcome.epochs}
    return {**found, "train_seconds": round(time.perf_counter() - start, 3)}


def run_graph(recorder: Recorder, name: str, args: Namespace) -> None:
    """Every model, seed and side on one graph, save what is done already."""
    graph = recorder.prepare(f"graph {name}", lambda: read_graph(args.data, name).to(recorder.device))
    if graph is None:
        return
    pyg = (dense_features(graph), graph.edge_index())
    for model in listed(args.models):
        settings = settings_of(model, args.epochs)
        for seed in range(args.seeds):
            for side in listed(args.sides):
                key = {"graph": name, "model": model, "side": side, "seed": seed}
                recorder.cell(
                    key,
                    lambda s=side, m=model, o=settings, n=seed: {**train(s, graph, m, o, n, pyg), "settings": o},
                    free=False,
                )


def row(cells: list[dict[str, Any]], graph: str, model: str) -> dict[str, Any]:
    """Mean, standard error and number of seeds of both sides, and their difference in standard errors."""
    found: dict[str, Any] = {"graph": graph, "model": model}
    errors = []
    for side in SIDES:
        fitting = [c for c in cells if (c["graph"], c["model"], c["side"]) == (graph, model, side)]
        tests = [100 * c["test"] for c in fitting if c["status"] == "ok"]
        error = stdev(tests) / math.sqrt(len(tests)) if len(tests) > 1 else None
        found |= {side: mean(tests) if tests else None, f"{side}_error": error, f"{side}_seeds": len(tests)}
        errors.append(error)
    if all(error is not None for error in errors):
        joint = math.hypot(*errors)
        gap = abs(found["weft"] - found["pyg"])
        found["difference"] = gap / joint if joint else (0.0 if gap == 0 else math.inf)
    return found


def _shown(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + ("" if error is None else f" ± {error:.2f}")


def print_report(recorder: Recorder, args: Namespace) -> None:
    """The table in Markdown."""
    rows = [row(recorder.cells, g, m) for g in listed(args.graphs) for m in listed(args.models)]
    recorder.save(summary=rows)
    table = [
        [r["graph"], r["model"], _shown(r["weft"], r["weft_error"]), _shown(r["pyg"], r["pyg_error"]),
         r.get("difference"), f"{r['weft_seeds']}/{r['pyg_seeds']}"]
        for r in rows
    ]  # fmt: skip
    print_table(["graph", "model", "Weft %", "PyG %", "difference in standard errors", "seeds"], table)
    gaps = [r["difference"] for r in rows if r.get("difference") is not None]
    if gaps:
        print(
            f"largest difference: {max(gaps):.2f} standard errors; {sum(g <= 2 for g in gaps)} of {len(gaps)} within 2"
        )


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the npz files")
    parser.add_argument("--graphs", default=GRAPHS)
    parser.add_argument("--models", default=",".join(SETTINGS))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, help="at most so many, to try this out")
    return parser.parse_args()


def main() -> None:
    """Train everything that is not done yet and print the table."""
    args = arguments()
    recorder = Recorder("accuracy", args)
    for name in listed(args.graphs):
        run_graph(recorder, name, args)
    print_report(recorder, args)


if __name__ == "__main__":
    main()
