"""SpMM against cuSPARSE with cached descriptors, both replayed from a CUDA graph; of one task, or of many at once.

    python -m benchmarks.suites.spmm --shapes pubmed,arxiv,products --features 16,64,256,1024 --out spmm.json
    python -m benchmarks.suites.spmm --tasks 1,2,4,8,16,32,64 --shapes arxiv --features 64 --out multi_kernels.json

The matrix is GCN's ``D^-1/2 (A + I) D^-1/2``. cuSPARSE gets its values, by the fastest of its algorithms; Weft gets the
same matrix twice, as structure with row and column scales (how its GCN runs, ``scales``) and with explicit weights
(``weights``), each with its rows by length and by cluster (``--rows``); the summary takes the order that a plan would.

Of T tasks Weft takes ``[T, N, F]`` as a stacked step has it (``batched``); cuSPARSE gets the same numbers as one
``[N, T * F]`` matrix (``wide``, which a stacked step would have to transpose for) and as T matrices (``separate``).
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import cusparse
from benchmarks.baselines.cusparse import csr, edge_values
from benchmarks.harness import timing as clock
from benchmarks.harness.graphs import bare, make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, listed
from weft import ops
from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sparse.row_clusters import order_rows
from weft.planner.grouping.step_options import row_order

ORDERS = ("length", "cluster")
SET_BYTES = 24e9  # inputs and outputs rotate among sets, so that a small x is not always in the cache
MOST_SETS, MOST_SETS_OF_TASKS = 16, 4
CHECKED_VALUES = 2**26
WORST_ERROR = 1e-5  # float32 sums land near 1e-7; a NaN marks an element that was not written
SIDES = ("cusparse", "scales", "weights")
SIDES_OF_TASKS = ("batched", "wide", "separate")


def row_forms(recorder: Recorder, name: str, matrix: Adjacency, wanted: str) -> dict[str, Adjacency]:
    """``matrix`` in every wanted order; the seconds that finding the clusters of graph ``name`` took are recorded."""
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
        clock.synchronize(matrix.device)
        start = time.perf_counter()
        order_rows(ordered)
        clock.synchronize(matrix.device)
        took[label] = round(time.perf_counter() - start, 5)
    return ordered, took


def planned_order(matrix: Adjacency, features: int, tasks: int = 1) -> str:
    """The order that a plan for 2,000 epochs of so many tasks of this hidden width takes on a GPU."""
    stats = GraphStats("graph", matrix.num_rows, matrix.num_edges)
    group = [Task(graph="graph", hidden=features, epochs=2000, name=str(place)) for place in range(tasks)]
    return "cluster" if row_order(group, stats, "cuda")[0] else "length"


class Inputs:
    """One matrix and several dense operands, ``[N, F]`` or ``[T, N, F]``; ``reference`` holds some rows in float64."""

    def __init__(
        self, matrix: Adjacency, values: Tensor, features: int, tasks: int | None = None, most_sets: int = MOST_SETS
    ) -> None:
        self.matrix, self.values, self.tasks, self.features = matrix, values, tasks, features
        width = features * (tasks or 1)
        size = (matrix.num_rows + matrix.num_cols) * width * clock.FLOAT
        most = most_sets if matrix.device.type == "cuda" else 1
        shape = (matrix.num_cols, features) if tasks is None else (tasks, matrix.num_cols, features)
        self.xs = [torch.randn(shape, device=matrix.device) for _ in range(max(1, min(most, int(SET_BYTES / size))))]
        self.rows = sample_rows(matrix, CHECKED_VALUES // width)
        self.reference = exact_rows(matrix, values, wide(self.xs[-1]), self.rows)

    def error(self, out: Tensor) -> float:
        """``|out - ref| / |ref|`` on the sampled rows; NaN if any element of ``out`` was not written."""
        if bool(out.isnan().any()):
            return math.nan
        difference = wide(out)[self.rows].double() - self.reference
        return float(difference.norm() / self.reference.norm())


def wide(x: Tensor) -> Tensor:
    """``[T, N, F]`` as ``[N, T * F]``; a matrix as it is."""
    return x if x.dim() == 2 else x.movedim(0, 1).reshape(x.shape[1], -1)


def sample_rows(matrix: Adjacency, most_edges: int) -> Tensor:
    """The largest hub and random rows with about ``most_edges`` edges together."""
    degrees = matrix.degrees()
    order = torch.randperm(matrix.num_rows, device=matrix.device)[:2000]
    order = torch.cat([degrees.argmax().reshape(1), order])
    fits = degrees[order].cumsum(0) <= max(most_edges, int(degrees.max()))
    return order[fits]


def exact_rows(matrix: Adjacency, values: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Rows of the product in float64 ``[len(rows), F]``."""
    lengths = matrix.degrees()[rows]
    slot = torch.repeat_interleave(torch.arange(rows.numel(), device=rows.device), lengths)
    first = lengths.cumsum(0) - lengths
    edge = torch.arange(slot.numel(), device=rows.device) - first[slot] + matrix.indptr[rows].long()[slot]
    messages = values[edge].double()[:, None] * x[matrix.indices[edge].long()].double()
    out = torch.zeros(rows.numel(), x.shape[1], dtype=torch.float64, device=x.device)
    return out.index_add_(0, slot, messages)


def measure(calls: list[Callable[[], Tensor]], inputs: Inputs, seconds: float) -> dict[str, Any]:
    """Time of one call and error of the last: all calls in one CUDA graph, replayed over poisoned outputs."""
    device = inputs.matrix.device

    def together() -> list[Tensor]:
        return [call() for call in calls]

    replay, outs, recorded = _recorded(together) if device.type == "cuda" else (together, together(), False)
    for out in outs:
        out.fill_(math.nan)
    outs = replay() or outs
    error = inputs.error(outs[-1])
    least = 10 if device.type == "cuda" else 3
    found = clock.time_until(replay, device, warmup=2, repeats=2 * least, seconds=seconds, least=least)
    return {"timing": found.scaled(1 / len(calls)), "error": error, "replayed": recorded}


def _recorded(together: Callable[[], list[Tensor]]) -> tuple[Callable[[], Any], list[Tensor], bool]:
    """The calls as a CUDA graph; as they are where they cannot be recorded."""
    try:
        graph, outs = clock.record_graph(together)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return together, together(), False
    return graph.replay, outs, True


def cusparse_calls(
    handle: cusparse.Handle | None, inputs: Inputs, algorithm: str, separate: bool
) -> list[Callable[[], Tensor]]:
    """cuSPARSE's product on every set, descriptors made now; ``separate``: task by task."""
    matrix, calls = inputs.matrix, []
    if handle is None:  # no GPU: torch's own product stands in, to try the benchmark out
        sparse = csr(matrix, inputs.values)
        if separate:
            return [lambda x=x: torch.stack([torch.sparse.mm(sparse, piece) for piece in x]) for x in inputs.xs]
        return [lambda x=x: torch.sparse.mm(sparse, wide(x)) for x in inputs.xs]
    for given in inputs.xs:
        x = given if separate else wide(given).contiguous()
        out = x.new_empty(*x.shape[:-2], matrix.num_rows, x.shape[-1])
        pieces = zip(x, out, strict=True) if separate else [(x, out)]
        products = [
            cusparse.Product(handle, matrix.indptr, matrix.indices, inputs.values, source, target, algorithm)
            for source, target in pieces
        ]

        def call(products: list[cusparse.Product] = products, out: Tensor = out) -> Tensor:
            for product in products:
                product()
            return out

        calls.append(call)
    return calls


def best_cusparse(
    handle: cusparse.Handle | None, inputs: Inputs, seconds: float, separate: bool = False
) -> dict[str, Any]:
    """The fastest algorithm's result, with the time of every algorithm beside it."""
    if handle is None and inputs.matrix.device.type == "cuda":
        raise RuntimeError("libcusparse could not be used; see 'prepared' for the reason")
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for algorithm in cusparse.ALGORITHMS if handle is not None else ("torch.sparse.mm",):
        try:
            results[algorithm] = measure(cusparse_calls(handle, inputs, algorithm, separate), inputs, seconds)
        except RuntimeError as error:
            failures[algorithm] = str(error).splitlines()[0]
    if not results:
        raise RuntimeError(f"no cuSPARSE algorithm ran: {failures}")
    best = min(results, key=lambda name: results[name]["timing"].ms)
    every = {name: round(found["timing"].ms, 4) for name, found in results.items()}
    return {**results[best], "algorithm": best, "every_algorithm_ms": every, "failures": failures}


def measure_cell(
    side: str, inputs: Inputs, handle: cusparse.Handle | None, seconds: float, form: Adjacency | None = None
) -> dict[str, Any]:
    """Time, error and achieved TB/s of one side; ``form`` is the matrix with its rows in another order."""
    with torch.no_grad():
        if side in ("cusparse", "wide", "separate"):
            found = best_cusparse(handle, inputs, seconds, side == "separate")
        else:
            matrix = inputs.matrix if form is None else form
            matrix = matrix.scaled(weight=inputs.values) if side == "weights" else matrix
            found = measure([lambda x=x: ops.spmm(matrix, x) for x in inputs.xs], inputs, seconds)
    if not found["error"] < WORST_ERROR:
        raise RuntimeError(f"wrong result: error {found['error']:.3g} against float64 on sampled rows")
    took: clock.Timing = found.pop("timing")
    adj, width = inputs.matrix, inputs.features * (inputs.tasks or 1)
    factors = 2 * clock.FLOAT * adj.num_rows if side in ("scales", "batched") else clock.FLOAT * adj.num_edges
    return {
        "ms": round(took.ms, 5),
        **({} if inputs.tasks is None else {"ms_a_task": round(took.ms / inputs.tasks, 5)}),
        "compulsory_tb_s": round(clock.compulsory_bytes(adj, width, factors) / took.ms / 1e9, 4),
        "gathered_tb_s": round(clock.gathered_bytes(adj, width, factors) / took.ms / 1e9, 4),
        **found,
        "sets": len(inputs.xs),
        "timing": took.to_dict(),
    }


def run_shape(recorder: Recorder, shape: str, args: Namespace, handle: cusparse.Handle | None) -> None:
    """All widths, or all numbers of tasks, of one shape."""
    matrix = recorder.prepare(f"graph {shape}", lambda: make_graph(shape, recorder.device, args.scale).adj.gcn())
    if matrix is None:
        return
    values = edge_values(matrix)
    recorder.say(f"{shape}: {matrix.num_rows:,} rows, {matrix.num_edges:,} entries")
    forms = row_forms(recorder, shape, matrix, args.rows)
    widths = [int(text) for text in listed(args.features)]
    cases = [({"shape": shape, "features": width}, width, None) for width in widths]
    if args.tasks:
        cases = [({"part": "widths", "tasks": int(text)}, widths[0], int(text)) for text in listed(args.tasks)]
    for key, width, tasks in cases:
        made: list[Inputs] = []
        sets = args.sets if tasks is None else min(args.sets, MOST_SETS_OF_TASKS)
        make = partial(Inputs, matrix, values, width, tasks, sets)

        def work(side: str, form: Adjacency | None, make: Any = make, made: list[Inputs] = made) -> dict[str, Any]:
            made.extend([] if made else [make()])
            return measure_cell(side, made[0], handle, args.cell_seconds, form)

        plan = planned_order(matrix, width, tasks or 1)
        for side in args.sides:
            if side in ("cusparse", "wide", "separate"):
                recorder.cell({**key, "side": side}, partial(work, side, None))
                continue
            for order, form in forms.items():
                cell = recorder.cell({**key, "side": side, "rows": order}, partial(work, side, form))
                cell["planned"] = order == plan or len(forms) == 1
        made.clear()


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="pubmed,arxiv,products,reddit")
    parser.add_argument("--features", default="16,64,256,1024")
    parser.add_argument("--tasks", default="", help="numbers of tasks at once, instead of single products")
    parser.add_argument("--sides", type=listed, default=[])
    parser.add_argument("--rows", choices=(*ORDERS, "both"), default="both", help="orders in which Weft takes rows")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    parser.add_argument("--cell-seconds", type=float, default=1.0, help="timed seconds of one variant")
    parser.add_argument("--sets", type=int, default=MOST_SETS, help="inputs to rotate among, where they fit")
    args = parser.parse_args()
    args.sides = args.sides or list(SIDES_OF_TASKS if args.tasks else SIDES)
    return args


def main() -> None:
    """Run the cells and print the table."""
    from benchmarks.report import training

    args = arguments()
    recorder = Recorder("multi_kernels" if args.tasks else "spmm", args)
    recorder.about["copy_tb_s"] = clock.copy_bandwidth(recorder.device)
    handle = recorder.prepare("cuSPARSE", cusparse.Handle) if recorder.device.type == "cuda" else None
    if handle is not None:
        recorder.about["environment"]["cusparse"] = handle.version()
    for shape in listed(args.shapes):
        run_shape(recorder, shape, args, handle)
    recorder.print_tables(training.multi_kernels if args.tasks else training.spmm)
    print(f"device copy: {recorder.about['copy_tb_s']:.3f} TB/s")


if __name__ == "__main__":
    main()
