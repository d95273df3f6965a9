"""Test accuracy of sampled training: Weft against PyG's NeighborLoader with the same settings, mean over seeds.

    python -m benchmarks.suites.sampled_accuracy --data DIR --out sampled_accuracy.json

GCN and SAGE of 2 layers, fan-out [10, 10], batches of 1,024 seeds, evaluated on the whole graph after every epoch; the
test accuracy is that of the best validation epoch. Features are row-normalised bags of words of thousands of columns,
which PyG's layers copy per edge; all sides get the same 128 random projections of them. PyG's GCN normalises by the
degrees in a batch, Weft's by those of the graph with sampled edges weighted up. The side ``fed`` is Weft on the batches
of PyG's loader (``weft.run(task, batches=loader)``), where GCN normalises as PyG's does.
Trainings that ``--out`` has already are not repeated.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.baselines.neighbor_loader import check_pyg_samples, pyg_loader, train_steps
from benchmarks.baselines.pyg_training import evaluate, make_optimizer
from benchmarks.harness.graphs import read_graph
from benchmarks.harness.recorder import Recorder, common_arguments, listed, print_table
from benchmarks.suites.accuracy import row
from weft.core.task import Task
from weft.engine.run import run as weft_run
from weft.graph.graph import Graph

SETTINGS: dict[str, Any] = {
    "layers": 2, "hidden": 64, "dropout": 0.5, "lr": 0.01, "weight_decay": 5e-4, "fanout": (10, 10), "batch": 1024,
}  # fmt: skip
EPOCHS = {"facebook": 10, "squirrel": 30}
PROJECTIONS = 128
SIDES = ("weft", "fed", "pyg")


def projected(graph: Graph) -> Graph:
    """The graph with dense random projections of its features, scaled to a spread of 1."""
    random = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (graph.num_features, PROJECTIONS), generator=random) * 2.0 - 1
    x = graph.x.to_dense() if not isinstance(graph.x, Tensor) else graph.x
    x = x @ signs
    return graph._changed(x=x / x.std())


def train(side: str, graph: Graph, task: Task) -> dict[str, Any]:
    """One training of one side."""
    start = time.perf_counter()
    if side != "pyg":
        torch.manual_seed(task.seed)  # of the loader's order and draws
        loader = pyg_loader(graph, task.fanouts, task.batch) if side == "fed" else None
        metrics = weft_run(task, device=graph.device, progress=False, batches=loader).metrics
        found = {"val": metrics["val_accuracy"], "test": metrics["test_accuracy"]}
    else:
        found = dict(zip(("val", "test"), train_pyg(task, graph), strict=True))
    return {**found, "train_seconds": round(time.perf_counter() - start, 2), "settings": about(task)}


def about(task: Task) -> dict[str, Any]:
    """The settings, as they are compared."""
    return {**SETTINGS, "fanout": list(task.fanouts), "epochs": task.epochs, "projections": PROJECTIONS}


def train_pyg(task: Task, graph: Graph) -> tuple[float, float]:
    """Validation and test accuracy of PyG's model at its best validation epoch."""
    torch.manual_seed(task.seed)
    net = pyg_net(task, graph)
    optimizer, loader = make_optimizer(task, net), pyg_loader(graph, task.fanouts, task.batch)
    edge_index, best = graph.edge_index(), (-1.0, 0.0)
    for _ in range(task.epochs):
        for _ in train_steps(net, optimizer, loader, F.cross_entropy):
            pass
        found = evaluate(net, graph.x, edge_index, graph)
        best = found if found[0] > best[0] else best
    return best


def pyg_net(task: Task, graph: Graph) -> torch.nn.Module:
    """PyG's model of that name; nothing is cached, since every batch has its own edges."""
    from torch_geometric.nn import models

    build = {"gcn": models.GCN, "sage": models.GraphSAGE}[task.model]
    return build(graph.num_features, task.hidden, task.layers, graph.num_classes, dropout=task.dropout)


def run_graph(recorder: Recorder, name: str, args: Namespace) -> None:
    """Every model, seed and side on one graph."""
    graph = recorder.prepare(f"graph {name}", lambda: projected(read_graph(args.data, name)).to(recorder.device))
    if graph is None:
        return
    epochs = args.epochs or EPOCHS[name]
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for model in listed(args.models):
            for side in SIDES:
                own = {"batch_seed": seed} if side == "weft" else {}
                task = Task(graph=graph, model=model, mode="sampled", epochs=epochs, seed=seed, **own, **SETTINGS)
                key = {"graph": name, "model": model, "side": side, "seed": seed}
                recorder.cell(key, lambda s=side, t=task: train(s, graph, t), free=False)


def print_report(recorder: Recorder, args: Namespace) -> None:
    """Means, standard errors and differences."""
    rows = [
        {"side": side, **row(_against_pyg(recorder.cells, side), graph, model)}
        for graph in listed(args.graphs)
        for model in listed(args.models)
        for side in SIDES[:2]
    ]
    recorder.save(summary=rows)
    shown = [
        [r["graph"], r["model"], r["side"], *(f"{r[s]:.2f} ± {r[f'{s}_error']:.2f}" for s in ("weft", "pyg")),
         r["difference"], r["weft_seeds"]]
        for r in rows if r.get("difference") is not None
    ]  # fmt: skip
    print_table(["graph", "model", "side", "Weft %", "PyG %", "difference in standard errors", "seeds"], shown)


def _against_pyg(cells: list[dict[str, Any]], side: str) -> list[dict[str, Any]]:
    """The cells of ``side`` as Weft's, and PyG's."""
    return [{**c, "side": "weft" if c["side"] == side else "pyg"} for c in cells if c["side"] in (side, "pyg")]


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.set_defaults(device="cpu", resume=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with the npz files")
    parser.add_argument("--graphs", default=",".join(EPOCHS))
    parser.add_argument("--models", default="gcn,sage")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="other than the usual, to try this out")
    return parser.parse_args()


def main() -> None:
    """Train everything that is not done yet and print the table."""
    args = arguments()
    recorder = Recorder("sampled_accuracy", args)
    recorder.about["pyg_samples_with"] = check_pyg_samples()
    for name in listed(args.graphs):
        run_graph(recorder, name, args)
    print_report(recorder, args)


if __name__ == "__main__":
    main()
