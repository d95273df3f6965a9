"""The model of 8, 64 and 512 GPUs: the table of docs/scaling.md, from ``weft plan``'s estimates. Needs no GPU.

python -m benchmarks.suites.scaling
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence

from benchmarks.harness.graphs import full_name
from benchmarks.harness.recorder import listed
from benchmarks.report.markdown import print_rows
from weft.core.task import Task
from weft.core.units import show_bytes, show_seconds
from weft.engine.plan import plan, shard_groups
from weft.planner.cost.sharding import ShardingEstimate
from weft.planner.report.plan_report import PlanReport

GPUS = (8, 64, 512)
MODELS = {"GCN 2 x 16": {"model": "gcn", "layers": 2, "hidden": 16}, "GIN 5 x 64": {"model": "gin", "layers": 5}}
SHAPES = ("products", "reddit", "orkut", "enwiki", "papers100m")


def predict(shape: str, model: str, machine: str = "h200") -> tuple[PlanReport, list[ShardingEstimate]]:
    """One device's plan of a model on a shape, and the estimates over :data:`GPUS`."""
    task = Task(graph=f"shape:{full_name(shape)}", mode="full", **{"hidden": 64, **MODELS[model]})
    report = plan(task, machine=machine)
    return report, [shard_groups(report, count)[0] for count in GPUS]


def row(shape: str, model: str, machine: str = "h200") -> tuple[str, ...]:
    """A line of the table."""
    report, found = predict(shape, model, machine)
    cost = report.groups[0].cost
    alone = show_seconds(cost.epoch_seconds) if report.fits else f"does not fit ({show_bytes(cost.total_bytes)})"
    cells = [f"{show_seconds(one.epoch_seconds)}, {show_bytes(one.bytes_per_rank)}" for one in found]
    if report.fits:
        cells = [f"{words} ({one.speed_up:.1f}x)" for words, one in zip(cells, found, strict=True)]
    return (f"{full_name(shape)}, {model}", alone, *cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=listed, default=list(SHAPES))
    parser.add_argument("--machine", default="h200")
    args = parser.parse_args(arguments)
    rows = [row(shape, "GCN 2 x 16", args.machine) for shape in args.shapes[:1]]
    rows += [row(shape, "GIN 5 x 64", args.machine) for shape in args.shapes]
    print_rows(("graph, model", f"one {args.machine.upper()}", *(f"{count} GPUs" for count in GPUS)), rows)


if __name__ == "__main__":
    main()
