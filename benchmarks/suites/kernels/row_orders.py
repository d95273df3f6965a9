"""A matrix with its rows by length and by cluster, what finding the clusters took, and which a plan would take."""

from __future__ import annotations

import time
from argparse import ArgumentParser

from benchmarks.harness.graphs import bare
from benchmarks.harness.recorder import Recorder
from benchmarks.harness.timing import synchronize
from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sparse.row_clusters import order_rows
from weft.planner.grouping.step_options import row_order

ORDERS = ("length", "cluster")


def add_option(parser: ArgumentParser) -> None:
    """``--rows``."""
    parser.add_argument(
        "--rows", choices=(*ORDERS, "both"), default="both", help="orders in which Weft takes the rows of the graph"
    )


def forms(recorder: Recorder, name: str, matrix: Adjacency, wanted: str) -> dict[str, Adjacency]:
    """``matrix`` in every wanted order; the seconds that the clusters of graph ``name`` took are recorded."""
    found = {"length": matrix} if wanted != "cluster" else {}
    made = recorder.prepare(f"clusters of {name}", lambda: _ordered(matrix)) if wanted != "length" else None
    if made is not None:
        found["cluster"], took = made
        recorder.about.setdefault("row_orders", {})[name] = took
        recorder.say(f"clusters of {name}: {took['first_seconds']:.3f} s the first time, then {took['seconds']:.4f} s")
    return found


def _ordered(matrix: Adjacency) -> tuple[Adjacency, dict[str, float]]:
    """A copy by cluster. They are found twice: the first time kernels may have to be compiled."""
    took = {}
    for label in ("first_seconds", "seconds"):
        ordered = bare(matrix)
        synchronize(matrix.device)
        start = time.perf_counter()
        order_rows(ordered)
        synchronize(matrix.device)
        took[label] = round(time.perf_counter() - start, 5)
    return ordered, took


def planned(matrix: Adjacency, features: int, tasks: int = 1) -> str:
    """The order that a plan for 2,000 epochs of so many tasks of this hidden width takes on a GPU."""
    stats = GraphStats("graph", matrix.num_rows, matrix.num_edges)
    group = [Task(graph="graph", hidden=features, epochs=2000, name=str(place)) for place in range(tasks)]
    return "cluster" if row_order(group, stats, "cuda")[0] else "length"
