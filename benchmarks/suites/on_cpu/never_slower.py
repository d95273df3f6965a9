"""A sweep of a user's module on a CPU is not slower than the same tasks one after another: 12 modules on 3 graphs.

    OMP_NUM_THREADS=1 python -m benchmarks.suites.on_cpu.never_slower [--out never_slower.json]

Sides: ``sweep`` is one ``weft.run`` of all tasks, ``turn`` a ``weft.run`` per task, ``loop`` a plain loop of torch over
the tasks. All evaluate after every epoch. Times are CPU seconds of the whole call on one thread, planning and trials
included, which a busy machine changes less than what a clock says: the least of ``--runs`` in alternation. Epochs are
chosen such that the loop takes ``--seconds``, between 20 and 200.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from benchmarks.baselines.epochs import dense_features
from benchmarks.baselines.modules import OPAQUE, opaque_module, random_module
from benchmarks.baselines.users_modules import NAMES, users_module
from benchmarks.harness.recorder import Recorder, common_arguments, find, listed, print_table
from weft.graph.data.graph import Graph
from weft.runtime.step.inputs import takes_edges

GRAPHS = ("shape:cora", "shape:pubmed", "shape:proteins")
MODULES = {
    **{name: (lambda name=name: opaque_module(name, layers=2, hidden=32)) for name in OPAQUE},
    **{name: (lambda name=name: users_module(name, hidden=32)) for name in NAMES},
    "random-1": lambda: random_module(1),
}
SIDES = ("sweep", "turn", "loop")
FEWEST, MOST = 20, 200


def tasks_of(module: str, graph: Graph, tasks: int, epochs: int) -> list[weft.Task]:
    """``tasks`` seeds of a module."""
    model = MODULES[module]()
    return [weft.Task(graph=graph, model=model, seed=seed, epochs=epochs, name=f"{seed}") for seed in range(tasks)]


def train_loop(task: weft.Task, graph: Graph, inputs: Sequence[Any]) -> float:
    """A plain loop of torch; the best validation accuracy."""
    torch.manual_seed(task.seed)
    model = task.model(graph.num_features, graph.num_classes)
    optimizer, best = torch.optim.Adam(model.parameters(), lr=task.lr), 0.0
    for _ in range(task.epochs):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(*inputs)[graph.train], graph.y[graph.train]).backward()
        optimizer.step()
        best = max(best, evaluate(model, graph, inputs))
    return best


@torch.no_grad()
def evaluate(model: nn.Module, graph: Graph, inputs: Sequence[Any]) -> float:
    """Losses and accuracies of all splits, as Weft records them; the validation accuracy."""
    model.eval()
    logits, found = model(*inputs), {}
    for name in ("train", "val", "test"):
        rows = getattr(graph, name)
        F.cross_entropy(logits[rows], graph.y[rows]).item()
        found[name] = (logits[rows].argmax(1) == graph.y[rows]).float().mean().item()
    return found["val"]


def inputs_of(module: str, graph: Graph, x: Tensor) -> tuple[Any, Any]:
    """What the module is called with."""
    model = MODULES[module]()(graph.num_features, graph.num_classes)
    return x, graph.edge_index() if takes_edges(model) else graph.adj


def sides(tasks: Sequence[weft.Task], graph: Graph, inputs: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """What every side does, whole."""
    return {
        "sweep": lambda: run_noting(list(tasks)),
        "turn": lambda: [weft.run(task, device="cpu", progress=False) for task in tasks],
        "loop": lambda: [train_loop(task, graph, inputs) for task in tasks],
    }


def run_noting(tasks: list[weft.Task]) -> list[str]:
    """Train a sweep; what it said of its stacks."""
    notes: list[str] = []

    def listen(event: Any) -> None:
        if event.kind == "note":
            notes.append(event.data["message"])

    weft.run(tasks, device="cpu", progress=False, on_event=listen)
    return notes


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and what ``work`` gave."""
    begin = time.process_time()
    found = work()
    return time.process_time() - begin, found


def measure(module: str, graph: Graph, x: Tensor, args: Namespace) -> dict[str, Any]:
    """The least CPU seconds of every side, and what the sweep said of its stack."""
    inputs = inputs_of(module, graph, x)
    few = tasks_of(module, graph, args.tasks, 3)
    warm = {side: cpu_seconds(work)[0] for side, work in sides(few, graph, inputs).items()}
    epochs = int(min(max(3 * args.seconds / warm["loop"], FEWEST), MOST))
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    notes: list[str] = []
    for _ in range(args.runs):
        for side, work in sides(tasks_of(module, graph, args.tasks, epochs), graph, inputs).items():
            seconds, found = cpu_seconds(work)
            taken[side].append(seconds)
            if side == "sweep":
                notes = found
    best = {side: min(seconds) for side, seconds in taken.items()}
    return {
        "epochs": epochs,
        **{f"{side}_cpu_seconds": round(seconds, 3) for side, seconds in best.items()},
        "turn_over_sweep": round(best["turn"] / best["sweep"], 3),
        "loop_over_sweep": round(best["loop"] / best["sweep"], 3),
        "notes": notes,
    }


def table(cells: list[dict[str, Any]]) -> list[list[Any]]:
    """A row per module: how many times as fast the sweep is, per graph, against tasks in turn and against the loop."""
    graphs = list(dict.fromkeys(cell["graph"] for cell in cells))
    rows = []
    for module in dict.fromkeys(cell["module"] for cell in cells):
        found = [find(cells, module=module, graph=graph) or {} for graph in graphs]
        rows.append([module, *(cell.get(name) for cell in found for name in ("turn_over_sweep", "loop_over_sweep"))])
    return rows


def worst(cells: list[dict[str, Any]]) -> dict[str, float]:
    """The least ratio of each kind."""
    names = ("turn_over_sweep", "loop_over_sweep")
    return {name: min((cell[name] for cell in cells if name in cell), default=0.0) for name in names}


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.set_defaults(device="cpu")
    parser.add_argument("--graphs", type=listed, default=list(GRAPHS))
    parser.add_argument("--modules", type=listed, default=list(MODULES))
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    return parser.parse_args()


def main() -> None:
    """Measure every module on every graph and print the ratios."""
    args = arguments()
    torch.set_num_threads(1)
    recorder = Recorder("never_slower", args)
    for name in args.graphs:
        graph = recorder.prepare(name, lambda n=name: weft.load(n))
        if graph is None:
            continue
        x = dense_features(graph)
        for module in args.modules:
            recorder.cell({"graph": name, "module": module}, lambda m=module, g=graph, x=x: measure(m, g, x, args))
    recorder.save(summary=worst(recorder.cells))
    print_table(["module", *(f"{name} {side}" for name in args.graphs for side in SIDES[1:])], table(recorder.cells))
    print(worst(recorder.cells))


if __name__ == "__main__":
    main()
