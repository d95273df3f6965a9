"""A sweep of a user's module on a CPU is not slower than the same tasks one after another: 12 modules on 3 graphs.

    OMP_NUM_THREADS=1 python -m benchmarks.suites.on_cpu.never_slower [--out never_slower.json]

Sides: ``sweep`` is the group that ``weft.run`` builds for all tasks, stacked, or side by side where a stack is slower;
``turn`` as many epochs of one task alone in Weft; ``loop`` as many of a plain loop of torch. An epoch trains and
evaluates on all sides. Times are CPU milliseconds of an epoch of all tasks on one thread, which a busy
machine changes less than what a clock says: the least of ``--runs``, in alternation.
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
from weft.core.plan import Plan
from weft.engine.memory import keep_heap
from weft.graph.graph import Graph
from weft.runtime.group import GroupRun
from weft.runtime.step.inputs import takes_edges

GRAPHS = ("shape:cora", "shape:pubmed", "shape:proteins")
MODULES = {
    **{name: (lambda name=name: opaque_module(name, layers=2, hidden=32)) for name in OPAQUE},
    **{name: (lambda name=name: users_module(name, hidden=32)) for name in NAMES},
    "random-1": lambda: random_module(1),
}
SIDES = ("sweep", "turn", "loop")


def tasks_of(module: str, graph: Graph, tasks: int, epochs: int) -> list[weft.Task]:
    """``tasks`` seeds of a module."""
    model = MODULES[module]()
    return [weft.Task(graph=graph, model=model, seed=seed, epochs=epochs, name=f"{seed}") for seed in range(tasks)]


def loop_epoch(task: weft.Task, graph: Graph, inputs: Sequence[Any]) -> Callable[[], Any]:
    """An epoch of a plain loop of torch."""
    torch.manual_seed(task.seed)
    model = task.model(graph.num_features, graph.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.lr)

    def epoch() -> None:
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(*inputs)[graph.train], graph.y[graph.train]).backward()
        optimizer.step()
        evaluate(model, graph, inputs)

    return epoch


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


def group_of(tasks: Sequence[weft.Task], graph: Graph) -> GroupRun:
    """The group that a run builds: slow stacks are taken apart."""
    plan = Plan(tuple(task.label for task in tasks), join="stacked" if len(tasks) > 1 else "solo", device="cpu")
    keep_heap()  # as a run does
    group = GroupRun(tasks, graph, plan, torch.device("cpu"), measure=True)
    group.prepare()
    return group


def cpu_ms(work: Callable[[], Any]) -> float:
    """CPU milliseconds of this process."""
    begin = time.process_time()
    work()
    return 1e3 * (time.process_time() - begin)


def times(count: int, work: Callable[[], Any]) -> Callable[[], Any]:
    """``work``, so many times."""
    return lambda: [work() for _ in range(count)]


def measure(module: str, graph: Graph, x: Tensor, args: Namespace) -> dict[str, Any]:
    """The least CPU milliseconds of an epoch on every side, and the stacks that the sweep has."""
    tasks = tasks_of(module, graph, args.tasks, args.tasks * (args.runs + 2))
    together, alone = group_of(tasks, graph), group_of(tasks[:1], graph)
    epoch = loop_epoch(tasks[0], graph, inputs_of(module, graph, x))
    works = {"sweep": together.step, "turn": times(args.tasks, alone.step), "loop": times(args.tasks, epoch)}
    taken: dict[str, list[float]] = {side: [] for side in works}
    for _ in range(args.runs + 1):
        for side, work in works.items():
            taken[side].append(cpu_ms(work))
    least = {side: min(found[1:]) for side, found in taken.items()}
    return {
        **{f"{side}_ms": round(ms, 2) for side, ms in least.items()},
        "stacks": len(together.stacks),
        "turn_over_sweep": round(least["turn"] / least["sweep"], 3),
        "loop_over_sweep": round(least["loop"] / least["sweep"], 3),
    }


def table(cells: list[dict[str, Any]], graphs: Sequence[str]) -> list[list[Any]]:
    """A row per module: how many times as fast the sweep is, per graph, against tasks in turn and against the loop."""
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
    parser.add_argument("--runs", type=int, default=6)
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
    header = ["module", *(f"{name} {side}" for name in args.graphs for side in SIDES[1:])]
    print_table(header, table(recorder.cells, args.graphs))
    print(worst(recorder.cells))


if __name__ == "__main__":
    main()
