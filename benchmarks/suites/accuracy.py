"""Test accuracy of Weft beside PyG trained the same way: four models on the graphs of a folder, ten seeds.

    python -m benchmarks.suites.accuracy --data DIR --out accuracy.json

Same architecture, initial distributions, optimizer, epochs, dropout and selection (test accuracy of the epoch
with the best validation accuracy). Each training is a cell of its own; ``--resume`` continues an interrupted run. The
last column is the difference of the means in standard errors of it.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.baselines.epochs import dense_features, train_pyg
from benchmarks.harness.graphs import read_graph
from benchmarks.harness.recorder import Recorder, common_arguments, listed
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
    from benchmarks.report import runs

    args = arguments()
    recorder = Recorder("accuracy", args)
    for name in listed(args.graphs):
        run_graph(recorder, name, args)
    recorder.print_tables(runs.accuracy)


if __name__ == "__main__":
    main()
