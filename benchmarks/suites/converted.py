"""Layers of PyG in users' modules, kept and converted: an epoch with its evaluation, and the difference in numbers.

    python -m benchmarks.suites.converted [--device cuda] [--graphs shape:cora,squirrel.npz] [--out converted.json]
    python -m benchmarks.suites.converted --batch 1024 --graphs shape:ogbn-arxiv --epochs 2 --modules sage-jk,gat-drop

*Kept* is ``weft.run(..., convert=False)``, *converted* the same without it, or with ``convert=True`` where needed:
over sampled batches (``--batch``) and in ``gat-drop``, attention with dropout, whose masks are then others. One task of
``--epochs`` epochs each, in alternation ``--runs`` times, or until the time budget is spent. ``ms`` is the least of the
seconds per epoch that a run reports, which leaves planning, trials and compilation out; ``note`` is what that run says
of the conversion, ``each`` has all of them. ``apart`` is the largest relative difference of the training losses. Graphs
are names for ``weft.load``, or files.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import weft
from benchmarks.harness.recorder import Recorder, common_arguments, find, listed, print_table
from weft.graph.graph import Graph

Maker = Callable[[int, int], nn.Module]
SIDES = {"kept": False, "converted": None}
TINY = 1e-9  # losses below are zero


def model_of_pyg(kind: str, **options: Any) -> Maker:
    """A model of ``torch_geometric.nn.models`` with three layers of 64 and jumping knowledge: not one of Weft's own."""

    def make(in_features: int, out_features: int) -> nn.Module:
        from torch_geometric.nn import models

        return getattr(models, kind)(in_features, 64, 3, out_channels=out_features, jk="cat", **options)

    make.__name__ = f"{kind}-jk"
    return make


MODULES = {
    "gcn-jk": model_of_pyg("GCN"),
    "sage-jk": model_of_pyg("GraphSAGE"),
    "gin-jk": model_of_pyg("GIN"),
    "gat-jk": model_of_pyg("GAT", heads=4),
    "gat-drop": model_of_pyg("GAT", heads=4, dropout=0.5),
}


@dataclass(frozen=True)
class Run:
    """One run: milliseconds per epoch, training losses, and what it says of the conversion."""

    ms: float
    losses: list[float]
    note: str


def train(module: str, graph: Graph, side: str, args: Namespace) -> Run:
    """Train a module once."""
    notes: list[str] = []

    def listen(event: Any) -> None:
        if event.kind == "note":
            notes.append(event.data["message"])

    asked = True if args.batch or module == "gat-drop" else None  # what is not converted without
    how: dict[str, Any] = {"convert": asked if side == "converted" else SIDES[side]}
    if args.batch:
        how |= {"mode": "sampled", "batch": args.batch, "fanout": tuple(map(int, args.fanout))}
    task = weft.Task(graph=graph, model=MODULES[module], epochs=args.epochs, **how)
    result = weft.run(task, device=args.device, progress=False, on_event=listen, compile=False)
    note = next((note for note in notes if "convert" in note), "")
    return Run(1e3 * float(result.metrics["seconds_per_epoch"]), result.history["loss"], note)


def measure(module: str, graph: Graph, args: Namespace, left: Callable[[], float]) -> dict[str, Any]:
    """Both sides of one module on one graph; ``left()``: seconds of the budget, which end it after a pair of runs."""
    runs: list[dict[str, Run]] = []
    while len(runs) < args.runs and (not runs or left() > 0):
        runs.append({side: train(module, graph, side, args) for side in SIDES})
    best = {side: min((run[side] for run in runs), key=lambda run: run.ms) for side in SIDES}
    pairs = zip(best["kept"].losses, best["converted"].losses, strict=True)
    return {
        **{f"{side}_ms": round(run.ms, 3) for side, run in best.items()},
        "times": round(best["kept"].ms / best["converted"].ms, 2),
        "apart": max(abs(one - other) / max(abs(one), TINY) for one, other in pairs),
        "note": best["converted"].note,
        "each": [
            {**{f"{side}_ms": round(run[side].ms, 3) for side in SIDES}, "note": run["converted"].note} for run in runs
        ],
    }


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=listed, default=["shape:cora", "shape:pubmed", "shape:ogbn-arxiv"])
    parser.add_argument("--modules", type=listed, default=list(MODULES))
    parser.add_argument("--batch", type=int, default=0, help="train on sampled batches of so many seeds")
    parser.add_argument("--fanout", type=listed, default=["10", "10", "10"], help="neighbours per hop")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--runs", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Measure every module on every graph and print both sides."""
    args = arguments()
    recorder = Recorder("converted", args)
    for name in args.graphs:
        load = weft.open if name.endswith(".npz") else weft.load
        graph = recorder.prepare(name, lambda n=name, load=load: load(n))
        for module in args.modules if graph is not None else ():
            key = {"graph": name, "module": module, "batch": args.batch}
            recorder.cell(key, lambda m=module, g=graph: measure(m, g, args, lambda: recorder.left))
    recorder.save()
    columns = ("kept_ms", "converted_ms", "times", "apart")
    rows = []
    for cell in recorder.cells:
        found = find([cell], graph=cell["graph"]) or {}
        rows.append([cell["graph"], cell["module"], *(found.get(column) for column in columns)])
    print_table(["graph", "module", *columns], rows)


if __name__ == "__main__":
    main()
