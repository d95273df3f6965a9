"""Every setting of a paper's mechanism once on small graphs: losses of separate runs, predicted and measured epochs.

    python -m benchmarks.suites.settings --out settings.json
    python -m benchmarks.suites.settings --quick --device cpu       few epochs; what needs a GPU is skipped

``weave``: six tasks of different structure on the demo graph, and GCN of 2, 2, 3 and 4 layers on the pubmed shape and
on a directed graph of its size, one group after another, concurrent and merged; on the last merged with pull-and-push
as well, which a symmetric graph has no use for. ``division``: two sampled models that share
batches, whose features and edges lie in host memory, by every way to prepare them. ``sharded``: two ranks on one device
by every way to sum remote rows. ``difference`` is the largest of the first losses from those of the side ``apart``,
relative to it; ``predicted_ms`` and ``measured_ms`` are epochs of all groups, with an evaluation in each if a case says
so.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import weft
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, listed
from weft.core.cost import Cost
from weft.core.errors import SpecError
from weft.core.run_options import WEAVES
from weft.core.settings import SHARDED_KERNELS
from weft.engine.home import HOME_VARIABLE
from weft.graph.generate import citation

COMPARED = 20  # first epochs whose losses are compared: rounding grows with every epoch
SIX = [("gcn", 2), ("gcn", 3), ("sage", 2), ("sage", 3), ("gin", 2), ("gat", 2)]
DEPTHS = [("gcn", n) for n in (2, 2, 3, 4)]
CASES = {
    "demo, six": ("demo", SIX),
    "demo, six, evaluated": ("demo", SIX),
    "directed, depths": (None, DEPTHS),
    "pubmed, depths": ("shape:pubmed", DEPTHS),
}
SAMPLED = {"mode": "sampled", "fanout": [5, 3], "batch": 512, "hidden": 64}
PLACED: dict[str, dict[str, Any]] = {
    "elastic": {"division": "elastic"},
    "fixed": {"division": "fixed"},
    "0.5": {"division": 0.5},
    "overlap": {"overlap": True},
}
Tasks = list[weft.Task]


def run(tasks: Tasks, device: str, **options: Any) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Figures of one run of ``tasks`` in a process state of its own, and the first losses of every task."""
    notes: list[str] = []
    listen = lambda event: notes.append(event.data["message"]) if event.kind == "note" else None  # noqa: E731
    with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, {HOME_VARIABLE: home}):
        chosen = weft.RunOptions.of(**options)
        try:
            result = weft.run(tasks, device=device, progress=False, on_event=listen, budget="16GiB", options=chosen)
        except SpecError as error:
            if device.startswith("cuda"):
                raise
            raise NotHere(str(error)) from None
    predicted = [Cost.from_dict(plan.cost).epoch_seconds for plan in result.plan]
    figures = {
        "join": [plan.join for plan in result.plan],
        "predicted_ms": 1e3 * sum(predicted),
        "measured_ms": 1e3 * sum(plan.measured.get("epoch_seconds", 0.0) for plan in result.plan),
        "groups": [
            [plan.join, 1e3 * one, 1e3 * plan.measured.get("epoch_seconds", 0.0)]
            for plan, one in zip(result.plan, predicted, strict=True)
        ],
        "divided": [None if plan.division is None else plan.division.words() for plan in result.plan],
        "notes": notes,
    }
    return figures, {member.name: member.history["loss"][:COMPARED] for member in result}


def difference(mine: dict[str, list[float]], apart: dict[str, list[float]]) -> float:
    """The largest of all losses, relative."""
    pairs = [pair for name in apart for pair in zip(mine[name], apart[name], strict=True)]
    return max(abs(one - other) / max(abs(other), 1e-6) for one, other in pairs)


def compared(recorder: Recorder, about: dict[str, Any], sides: dict[str, Callable[[], Any]]) -> None:
    """A cell per side, the first of which the others are compared with."""
    first: list[dict[str, list[float]]] = []

    def measure(make: Callable[[], Any]) -> dict[str, Any]:
        figures, losses = make()
        first.append(losses)
        return {**figures, "difference": difference(losses, first[0])}

    for side, make in sides.items():
        recorder.cell({**about, "side": side}, lambda make=make: measure(make))


def weave(recorder: Recorder, case: str, epochs: int) -> None:
    """All ways to share the device."""
    graph, structures = CASES[case]
    values, every = WEAVES[:-1], 1 if "evaluated" in case else epochs
    if graph is None:
        graph, values = citation(19_717, 88_676, 500, 3, directed=True, seed=1), ("off", "merged", "merged+push")
    tasks = [
        weft.Task(graph, model=m, layers=n, hidden=64, epochs=epochs, eval_every=every, seed=i, name=f"{m}-{n}-{i}")
        for i, (m, n) in enumerate(structures)
    ]
    sides = {value: lambda value=value: run(tasks, str(recorder.device), weave=value) for value in values}
    compared(recorder, {"setting": "weave", "case": case}, sides)


def division(recorder: Recorder, epochs: int) -> None:
    """All ways to prepare batches that two models share."""
    tasks = [weft.Task("shape:pubmed", model=model, name=model, epochs=epochs, **SAMPLED) for model in ("sage", "gcn")]
    where = {"features": "host", "topology": "host"}
    sides = {"apart": lambda: run(tasks, str(recorder.device), weave="off", **where)}
    sides |= {
        name: lambda more=more: run(tasks, str(recorder.device), **where, **more) for name, more in PLACED.items()
    }
    sides["on the GPU"] = lambda: run(tasks, str(recorder.device))
    compared(recorder, {"setting": "division", "case": "pubmed, two models"}, sides)


def sharded(recorder: Recorder, epochs: int, ways: list[str]) -> None:
    """All ways to sum rows of two ranks on one device."""
    tasks = [weft.Task("shape:pubmed", model="gcn", name="gcn", epochs=epochs, eval_every=epochs)]
    device = f"{recorder.device.type}:0"
    sides = {"apart": lambda: run(tasks, device)}
    sides |= {way: lambda way=way: run(tasks, device, ranks=2, sharded=way) for way in ways}
    compared(recorder, {"setting": "sharded", "case": "pubmed, two ranks"}, sides)


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--parts", default="weave,division,sharded")
    parser.add_argument("--cases", default=";".join(CASES), help="of weave, with ; between them")
    parser.add_argument("--ways", default=",".join(SHARDED_KERNELS), help="of sharded")
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="few epochs of the first case")
    args = parser.parse_args()
    if args.quick:
        args.epochs, args.cases = 4, next(iter(CASES))
    return args


def main() -> None:
    """Run the cells and print a line for each."""
    args = arguments()
    recorder, parts = Recorder("settings", args), listed(args.parts)
    for case in args.cases.split(";") if "weave" in parts else ():
        weave(recorder, case, args.epochs)
    if "division" in parts:
        division(recorder, max(args.epochs // 40, 2))
    if "sharded" in parts:
        sharded(recorder, COMPARED, listed(args.ways))
    for cell in recorder.cells:
        figures = [f"{name} {cell[name]:.4g}" for name in ("predicted_ms", "measured_ms", "difference") if name in cell]
        words = cell.get("error") or cell.get("reason") or cell.get("join")
        print(cell["setting"], cell["case"], cell["side"], cell["status"], *figures, words, sep=" | ")
        for note in filter(None, (*cell.get("divided", ()), *cell.get("notes", ()))):
            print("   ", note[:200])


if __name__ == "__main__":
    main()
