"""Sparse products of many tasks at once: one batched SpMM against one wide and T separate products of cuSPARSE.

    python -m benchmarks.suites.kernels.multi_kernels --out multi_kernels.json

``widths``: T x 64 features on one graph. Weft takes ``[T, N, 64]`` as a stacked step has it, with the rows of the graph
by length and by cluster (``--rows``); cuSPARSE gets the same numbers as one ``[N, T * 64]`` matrix (which a stacked
step would have to transpose for) and as T matrices, descriptors cached, best of its algorithms. ``passes``: three
forward products (sums over in-edges) and three backward ones (sums over out-edges) of six independent tasks on a
directed graph: joined in one launch, pulled and pushed over one structure, stacked by direction, and as six kernels one
after another (Weft's and cuSPARSE's).

All sides are replayed from a CUDA graph, so that launches count on none; results are compared with float64.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import cusparse
from benchmarks.baselines.cusparse_models import csr, edge_values
from benchmarks.harness import traffic
from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, find, listed, print_table
from benchmarks.harness.timing import Timing, copy_bandwidth, record_graph, time_until
from benchmarks.suites.kernels import row_orders
from benchmarks.suites.kernels.passes import Passes
from benchmarks.suites.kernels.spmm import WORST_ERROR, exact_rows, sample_rows
from weft import ops
from weft.ops.csr.adjacency import Adjacency

SIDES = ("batched", "wide", "separate")
SET_BYTES = 8e9
MOST_SETS = 4
CHECKED_VALUES = 2**26


class Operands:
    """The GCN matrix of one graph and sets of ``[T, N, F]`` inputs, so that no input sits in the cache from before."""

    def __init__(self, matrix: Adjacency, values: Tensor, tasks: int, features: int) -> None:
        self.matrix, self.values = matrix, values
        self.tasks, self.features = tasks, features
        size = 2 * matrix.num_rows * tasks * features * traffic.FLOAT
        most = MOST_SETS if matrix.device.type == "cuda" else 1
        sets = max(1, min(most, int(SET_BYTES / size)))
        self.xs = [torch.randn(tasks, matrix.num_cols, features, device=matrix.device) for _ in range(sets)]
        self.rows = sample_rows(matrix, CHECKED_VALUES // (tasks * features))
        wide = self.xs[-1].movedim(0, 1).reshape(matrix.num_cols, tasks * features)
        self.reference = exact_rows(matrix, values, wide, self.rows)

    def error(self, out: Tensor) -> float:
        """Relative error of ``out [T, N, F]`` on sampled rows; NaN where anything was left unwritten."""
        if bool(out.isnan().any()):
            return math.nan
        found = out[:, self.rows].movedim(0, 1).flatten(1).double()
        return float((found - self.reference).norm() / self.reference.norm())


def repeated(calls: list[Callable[[], Any]], device: torch.device, seconds: float) -> Timing:
    """Time of one call: all of them recorded together and replayed."""
    once: Callable[[], Any] = lambda: [call() for call in calls]  # noqa: E731
    if device.type == "cuda":
        graph, kept = record_graph(once)
        timing = time_until(graph.replay, device, warmup=2, repeats=30, seconds=seconds, least=10)
        del kept
    else:
        timing = time_until(once, device, warmup=1, repeats=5, seconds=seconds, least=3)
    return timing.scaled(1 / len(calls))


# ---- one side each -----------------------------------------------------------------------------------


def batched(operands: Operands, form: Adjacency, seconds: float) -> dict[str, Any]:
    """Weft on ``[T, N, F]``, with the rows in the order of ``form``."""
    error = operands.error(ops.spmm(form, operands.xs[-1]))
    calls = [lambda x=x: ops.spmm(form, x) for x in operands.xs]
    return {"timing": repeated(calls, operands.matrix.device, seconds), "error": error}


def best_product(
    handle: cusparse.Handle | None, operands: Operands, pieces: Callable[[Tensor], list[Tensor]], seconds: float
) -> dict[str, Any]:
    """cuSPARSE on ``pieces(x)`` (one wide matrix or T of them) of every set, by its fastest algorithm."""
    sets = [[piece.contiguous() for piece in pieces(x)] for x in operands.xs]
    every: dict[str, Timing] = {}
    errors: dict[str, float] = {}
    failures: dict[str, str] = {}
    for algorithm in cusparse.ALGORITHMS if handle is not None else ("torch.sparse.mm",):
        try:
            calls = [_product(handle, operands, pieces, algorithm) for pieces in sets]
            errors[algorithm] = operands.error(_as_tasks(calls[-1](), operands))
            every[algorithm] = repeated(calls, operands.matrix.device, seconds)
        except RuntimeError as error:
            failures[algorithm] = str(error).splitlines()[0]
    if not every:
        raise RuntimeError(f"no algorithm ran: {failures}")
    best = min(every, key=lambda name: every[name].ms)
    ms = {name: round(timing.ms, 4) for name, timing in every.items()}
    return {
        "timing": every[best],
        "error": errors[best],
        "algorithm": best,
        "every_algorithm_ms": ms,
        "failures": failures,
    }


def _product(
    handle: cusparse.Handle | None, operands: Operands, pieces: list[Tensor], algorithm: str
) -> Callable[[], list[Tensor]]:
    """A function that multiplies every piece; descriptors are made now."""
    matrix, values = operands.matrix, operands.values
    if handle is None:  # no GPU: torch's own product stands in, to try the benchmark out
        sparse = csr(matrix, values)
        return lambda: [torch.sparse.mm(sparse, piece) for piece in pieces]
    outs = [piece.new_empty(matrix.num_rows, piece.shape[1]) for piece in pieces]
    products = [
        cusparse.Product(handle, matrix.indptr, matrix.indices, values, piece, out, algorithm)
        for piece, out in zip(pieces, outs, strict=True)
    ]

    def call() -> list[Tensor]:
        for product in products:
            product()
        return outs

    return call


def _as_tasks(outs: list[Tensor], operands: Operands) -> Tensor:
    """The results as ``[T, N, F]``."""
    if len(outs) == operands.tasks and outs[0].shape[1] == operands.features:
        return torch.stack(outs)
    return outs[0].reshape(-1, operands.tasks, operands.features).movedim(1, 0)


def _wide(x: Tensor) -> list[Tensor]:
    return [x.movedim(0, 1).reshape(x.shape[1], -1)]


def measure(
    side: str, operands: Operands, handle: cusparse.Handle | None, seconds: float, form: Adjacency | None = None
) -> dict[str, Any]:
    """Time, error and achieved TB/s of one side; ``form`` is the matrix with its rows in another order."""
    with torch.no_grad():
        if side == "batched":
            found = batched(operands, operands.matrix if form is None else form, seconds)
        else:
            found = best_product(handle, operands, _wide if side == "wide" else list, seconds)
    if not found["error"] < WORST_ERROR:
        raise RuntimeError(f"wrong result: error {found['error']:.3g} against float64 on sampled rows")
    timing: Timing = found.pop("timing")
    gathered = traffic.gathered_bytes(operands.matrix, operands.tasks * operands.features, 0)
    return {
        "ms": round(timing.ms, 4),
        "ms_a_task": round(timing.ms / operands.tasks, 5),
        "gathered_tb_s": gathered / timing.ms / 1e9,
        **found,
        "timing": timing.to_dict(),
    }


# ---- the cells ---------------------------------------------------------------------------------------


def run_widths(recorder: Recorder, args: Namespace, handle: cusparse.Handle | None) -> None:
    """Every number of tasks and side on the undirected shape."""
    graph = recorder.prepare(f"graph {args.shape}", lambda: make_graph(args.shape, recorder.device, args.scale))
    if graph is None:
        return
    matrix = graph.adj.gcn()
    values = edge_values(matrix)
    forms = row_orders.forms(recorder, args.shape, matrix, args.rows)
    for tasks in (int(text) for text in listed(args.tasks)):
        made: list[Operands] = []

        def work(side: str, form: Adjacency | None, tasks: int = tasks, made: list[Operands] = made) -> dict[str, Any]:
            if not made:
                made.append(Operands(matrix, values, tasks, args.features))
            return measure(side, made[0], handle, args.cell_seconds, form)

        plan = row_orders.planned(matrix, args.features, tasks)
        for side in (side for side in SIDES if side in listed(args.sides)):
            key = {"part": "widths", "tasks": tasks, "side": side}
            if side != "batched":
                recorder.cell(key, partial(work, side, None))
                continue
            for order, form in forms.items():
                cell = recorder.cell({**key, "rows": order}, partial(work, side, form))
                cell["planned"] = order == plan or len(forms) == 1
        made.clear()


def run_passes(recorder: Recorder, args: Namespace, handle: cusparse.Handle | None) -> None:
    """Forward and backward products of several tasks on the directed shape."""
    graph = recorder.prepare(
        f"graph {args.directed_shape}", lambda: make_graph(args.directed_shape, recorder.device, args.scale)
    )
    if graph is None:
        return
    passes: list[Passes] = []
    for side in Passes.SIDES if handle is not None else Passes.SIDES[:-1]:

        def work(side: str = side) -> dict[str, Any]:
            if not passes:
                passes.append(Passes(graph.adj, args.forward, args.backward, args.features))
            with torch.no_grad():
                calls, error = passes[0].side(side, handle)
                timing = repeated(calls, recorder.device, args.cell_seconds)
            if not error < WORST_ERROR:
                raise RuntimeError(f"wrong result: error {error:.3g} against float64")
            return {"ms": round(timing.ms, 4), "error": error, "timing": timing.to_dict()}

        key = {"part": "passes", "forward": args.forward, "backward": args.backward, "side": side}
        recorder.cell(key, work)


def _widths(cells: list[dict[str, Any]], tasks: int) -> list[list[Any]]:
    """The lines of the first table for one T: Weft by every order of rows that was measured."""
    here = {"part": "widths", "tasks": tasks}
    others = [(find(cells, **here, side=side) or {}).get("ms") for side in SIDES[1:]]
    lines = []
    for order in row_orders.ORDERS:
        cell = find(cells, **here, side="batched", rows=order)
        if cell is not None:
            over = [other / cell["ms"] if other else None for other in others]
            label = f"{order} (planned)" if cell.get("planned") else order
            lines.append(
                [tasks, label, cell["ms"], *others, *over, cell["ms_a_task"], cell["gathered_tb_s"], cell["error"]]
            )
    return lines or [[tasks, None, None, *others, None, None, None, None, None]]


def print_report(recorder: Recorder) -> None:
    """The two tables."""
    cells = recorder.cells
    rows = [
        row
        for tasks in dict.fromkeys(c["tasks"] for c in cells if c["part"] == "widths")
        for row in _widths(cells, tasks)
    ]
    if rows:
        print_table(
            ["T", "rows by", "Weft ms", "one wide cuSPARSE", "T cuSPARSE", "wide/Weft", "T separate/Weft", "ms a task",
             "Weft gathered TB/s", "error"],
            rows,
        )  # fmt: skip
    passes = [[cell["side"], cell.get("ms"), cell.get("error")] for cell in cells if cell["part"] == "passes"]
    if passes:
        print_table(["3 forward, 3 backward", "ms", "error"], passes)
        separate = find(cells, part="passes", side="separate")
        for cell in (c for c in cells if c["part"] == "passes" and c["status"] == "ok" and separate):
            print(f"{cell['side']}: {separate['ms'] / cell['ms']:.2f}x separate kernels")


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--parts", default="widths,passes")
    parser.add_argument("--shape", default="arxiv")
    parser.add_argument("--directed-shape", default="ogbn-arxiv-directed")
    parser.add_argument("--tasks", default="16,1,2,4,8,32,64")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--forward", type=int, default=3)
    parser.add_argument("--backward", type=int, default=3)
    parser.add_argument("--sides", default=",".join(SIDES))
    row_orders.add_option(parser)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    parser.add_argument("--cell-seconds", type=float, default=0.5, help="timed seconds of one variant")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the tables."""
    args = arguments()
    recorder = Recorder("multi_kernels", args)
    recorder.about["copy_tb_s"] = copy_bandwidth(recorder.device)
    handle = recorder.prepare("cuSPARSE", cusparse.Handle) if recorder.device.type == "cuda" else None
    if "widths" in listed(args.parts):
        run_widths(recorder, args, handle)
    if "passes" in listed(args.parts):
        run_passes(recorder, args, handle)
    print_report(recorder)
    print(f"device copy: {recorder.about['copy_tb_s']:.3f} TB/s")
    recorder.save()


if __name__ == "__main__":
    main()
