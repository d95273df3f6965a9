"""A sweep of T tasks trained together, per task and epoch, against loops of PyG and of cuSPARSE over the same tasks.

    python -m benchmarks.suites.sweep --out sweep.json
    python -m benchmarks.suites.sweep --cases arxiv-gcn --tasks 1,2,4,8,16,32,64 --sides weft --out sizes.json

The tasks differ in learning rate, dropout and seed, as those of a sweep do. A loop over T tasks costs T times one, so
the baselines are measured on one task (as in ``benchmarks.suites.epoch``) and set against Weft's epoch divided by T.
All sides in one process on one graph. Baselines run in float32 and, for the cases in tf32 and bf16, PyG in that
precision too: with torch's setting for products, and under autocast.
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.baselines.epochs import Setting
from benchmarks.harness.graphs import fresh, make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, listed
from benchmarks.harness.timing import Memory, time_until
from benchmarks.harness.weft_side import eager_memory, group_epoch, weft_task
from benchmarks.suites.epoch import BASELINES, COMPILED_SIDES, checked, faster_order
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.runtime.device.process import matmul_precision

SIDES = ("weft", *BASELINES)
IN_PRECISION = ("pyg", "compiled", "captured")  # sides that are measured in tf32 and bf16 as well


@dataclass(frozen=True)
class Case:
    """A sweep: ``tasks`` tasks of one model on one shape."""

    shape: str
    model: str
    tasks: int
    layers: int
    precision: str = "fp32"

    @property
    def name(self) -> str:
        """``"arxiv-gcn"``, ``"arxiv-gcn-bf16"``."""
        return "-".join([self.shape, self.model, *([self.precision] if self.precision != "fp32" else [])])


CASES = (
    Case("cora", "gcn", 64, 2),
    Case("pubmed", "gcn", 64, 4),
    Case("arxiv", "gcn", 32, 3),
    Case("arxiv", "gcn", 32, 3, "tf32"),
    Case("arxiv", "gcn", 32, 3, "bf16"),
    Case("arxiv", "sage", 16, 3),
    Case("arxiv", "gin", 16, 3),
    Case("arxiv", "gat", 16, 3),
    Case("arxiv", "sage", 16, 3, "tf32"),
    Case("arxiv", "gin", 16, 3, "tf32"),
    Case("arxiv", "gat", 16, 3, "tf32"),
    Case("arxiv", "sage", 16, 3, "bf16"),
    Case("arxiv", "gin", 16, 3, "bf16"),
    Case("arxiv", "gat", 16, 3, "bf16"),
    Case("products", "gcn", 4, 3),
)


def setting_of(case: Case, args: Namespace) -> Setting:
    """The architecture of a case."""
    return Setting(layers=case.layers, hidden=args.hidden, heads=args.heads)


def sweep_tasks(case: Case, graph: Graph, setting: Setting, count: int) -> list[Task]:
    """``count`` tasks over rates from 0.001 to 0.01, dropout from 0.2 to 0.7, and seeds."""
    base = weft_task(case.model, graph, setting).with_values(precision=case.precision)
    shares = [place / max(count - 1, 1) for place in range(count)]
    return [
        base.with_values(name=f"{case.model}-{place}", lr=10 ** (share - 3), dropout=0.2 + 0.5 * share, seed=place)
        for place, share in enumerate(shares)
    ]


def measure_sweep(case: Case, graph: Graph, setting: Setting, count: int, seconds: float) -> dict[str, Any]:
    """Time and memory of one epoch of ``count`` stacked tasks, and what that is per task."""
    memory = Memory(graph.device)
    start = time.perf_counter()
    with matmul_precision(case.precision):
        weft = group_epoch(sweep_tasks(case, graph, setting, count), graph)
        weft.train()
        setup = time.perf_counter() - start
        least = 10 if graph.device.type == "cuda" else 2
        timing = time_until(weft.train, graph.device, warmup=3, repeats=50, seconds=seconds, least=least)
        setup_peak = memory.peak_gb()
        peak, added = eager_memory(memory, weft)
    return {
        "ms": round(timing.ms / count, 5),
        "epoch_ms": round(timing.ms, 4),
        "peak_gb": peak,
        "added_gb": added,
        "peak_with_setup_gb": setup_peak,
        "setup_seconds": round(setup, 2),
        "recorded": weft.recorded,
        "first_layer": weft.first_layer,
        "notes": weft.notes,
        "timing": timing.scaled(1 / count).to_dict(),
    }


def run_shape(recorder: Recorder, shape: str, cases: list[Case], args: Namespace) -> None:
    """Weft's cells of one shape first, then the baselines of its models."""
    graph = recorder.prepare(f"graph {shape}", lambda: make_graph(shape, recorder.device, args.scale))
    if graph is None:
        return
    wanted = listed(args.sides)
    for case in cases if "weft" in wanted else []:
        sizes = [int(text) for text in listed(args.tasks)] if args.tasks else [case.tasks]
        for count in sizes:
            key = {"shape": shape, "model": case.model, "precision": case.precision, "side": "weft", "tasks": count}
            setting = setting_of(case, args)
            recorder.cell(key, lambda c=case, n=count, s=setting: measure_sweep(c, fresh(graph), s, n, args.seconds))
    _baselines(recorder, graph, cases, [side for side in BASELINES if side in wanted], args)


def _baselines(recorder: Recorder, graph: Graph, cases: list[Case], sides: list[str], args: Namespace) -> None:
    if not sides:
        return
    order = "source"
    if not all(side.startswith("cusparse") for side in sides):
        setting = setting_of(cases[0], args)
        found = recorder.prepare(f"edge order {cases[0].shape}", lambda: faster_order(graph, setting))
        order = found or order
    for side in sorted(sides, key=lambda side: side in COMPILED_SIDES):  # what takes long to build comes last
        for case in baseline_cases(side, cases):
            key = {"shape": case.shape, "model": case.model, "precision": case.precision, "side": side, "tasks": 1}
            setting = setting_of(case, args)
            recorder.cell(
                key, lambda c=case, s=side, o=setting: checked(s, c.model, graph, o, order, args, c.precision)
            )


def baseline_cases(side: str, cases: list[Case]) -> list[Case]:
    """The models that a side trains, each in float32, and in a case's own precision if the side has it."""
    wanted = {(case.model, precision): replace(case, precision=precision)
              for case in cases for precision in dict.fromkeys(("fp32", case.precision))}  # fmt: skip
    return [case for case in wanted.values() if case.precision == "fp32" or side in IN_PRECISION]


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--tasks", default="", help="sizes of the sweep instead of each case's own: 1,2,4,...,64")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0, help="timed seconds of one sweep")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    parser.add_argument("--compile-large", action="store_true", help="compile on large graphs as well")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    from benchmarks.report import training

    args = arguments()
    recorder = Recorder("sweep", args)
    cases = [case for case in CASES if case.name in listed(args.cases)]
    for shape in dict.fromkeys(case.shape for case in cases):
        run_shape(recorder, shape, [case for case in cases if case.shape == shape], args)
    recorder.print_tables(training.sweep)


if __name__ == "__main__":
    main()
