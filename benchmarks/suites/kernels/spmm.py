"""SpMM against cuSPARSE with cached descriptors, both replayed from a CUDA graph.

The matrix is GCN's ``D^-1/2 (A + I) D^-1/2``. cuSPARSE gets its values; Weft gets the same matrix twice, as
structure with row and column scales (how its GCN runs) and with explicit weights, each with its rows by length and by
cluster (``--rows``); the summary takes the order that a plan would. ``--sweep`` tries launch parameters instead.

    python -m benchmarks.suites.kernels.spmm --shapes pubmed,arxiv,products --features 16,64,256,1024 --out spmm.json
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import cusparse
from benchmarks.baselines.cusparse_models import csr, edge_values
from benchmarks.harness import traffic
from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, listed, print_table
from benchmarks.harness.timing import Timing, copy_bandwidth, record_graph, time_until
from benchmarks.suites.kernels import row_orders
from weft import ops
from weft.ops.csr.adjacency import Adjacency

SET_BYTES = 24e9  # inputs and outputs rotate among sets, so that a small x is not always in the cache
MOST_SETS = 16
CHECKED_VALUES = 2**27
WORST_ERROR = 1e-5  # float32 sums land near 1e-7; a NaN marks an element that was not written
SIDES = ("cusparse", "scales", "weights")


class Inputs:
    """One matrix and several dense operands of one width; ``reference`` holds some rows in float64."""

    def __init__(self, matrix: Adjacency, values: Tensor, num_features: int, most_sets: int = MOST_SETS) -> None:
        self.matrix, self.values, self.num_features = matrix, values, num_features
        size = (matrix.num_rows + matrix.num_cols) * num_features * traffic.FLOAT
        most = most_sets if matrix.device.type == "cuda" else 1
        sets = max(1, min(most, int(SET_BYTES / size)))
        shape = (matrix.num_cols, num_features)
        self.xs = [torch.randn(shape, device=matrix.device) for _ in range(sets)]
        self.rows = sample_rows(matrix, CHECKED_VALUES // num_features)
        self.reference = exact_rows(matrix, values, self.xs[-1], self.rows)

    def error(self, out: Tensor) -> float:
        """``|out - ref| / |ref|`` on the sampled rows; NaN if any element of ``out`` was not written."""
        if bool(out.isnan().any()):
            return math.nan
        difference = out[self.rows].double() - self.reference
        return float(difference.norm() / self.reference.norm())


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


# ---- timing one side ---------------------------------------------------------------------------------


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
    timing = time_until(replay, device, warmup=2, repeats=2 * least, seconds=seconds, least=least)
    return {"timing": timing.scaled(1 / len(calls)), "error": error, "replayed": recorded}


def _recorded(together: Callable[[], list[Tensor]]) -> tuple[Callable[[], Any], list[Tensor], bool]:
    """The calls as a CUDA graph; as they are where they cannot be recorded."""
    try:
        graph, outs = record_graph(together)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return together, together(), False
    return graph.replay, outs, True


def weft_calls(inputs: Inputs, side: str, form: Adjacency) -> list[Callable[[], Tensor]]:
    """Weft's product on every set, with the rows in the order of ``form``."""
    matrix = form if side == "scales" else form.scaled(weight=inputs.values)
    return [lambda x=x: ops.spmm(matrix, x) for x in inputs.xs]


def cusparse_calls(handle: cusparse.Handle, inputs: Inputs, algorithm: str) -> list[Callable[[], Tensor]]:
    """cuSPARSE's product on every set, descriptors made now."""
    matrix = inputs.matrix
    calls = []
    for x in inputs.xs:
        out = x.new_empty(matrix.num_rows, inputs.num_features)
        product = cusparse.Product(handle, matrix.indptr, matrix.indices, inputs.values, x, out, algorithm)
        calls.append(lambda product=product, out=out: product() or out)
    return calls


def best_cusparse(handle: cusparse.Handle | None, inputs: Inputs, seconds: float) -> dict[str, Any]:
    """The fastest algorithm's result, with the time of every algorithm beside it."""
    if handle is None:
        if inputs.matrix.device.type == "cuda":
            raise RuntimeError("libcusparse could not be used; see 'prepared' for the reason")
        # No GPU: torch's own product stands in, to try the benchmark out.
        sparse = csr(inputs.matrix, inputs.values)
        calls = [lambda x=x: torch.sparse.mm(sparse, x) for x in inputs.xs]
        return {**measure(calls, inputs, seconds), "algorithm": "torch.sparse.mm"}
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for algorithm in cusparse.ALGORITHMS:
        try:
            results[algorithm] = measure(cusparse_calls(handle, inputs, algorithm), inputs, seconds)
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
        if side == "cusparse":
            found = best_cusparse(handle, inputs, seconds)
        else:
            found = measure(weft_calls(inputs, side, inputs.matrix if form is None else form), inputs, seconds)
    if not found["error"] < WORST_ERROR:
        raise RuntimeError(f"wrong result: error {found['error']:.3g} against float64 on sampled rows")
    timing: Timing = found.pop("timing")
    adj, width = inputs.matrix, inputs.num_features
    scales = 2 * traffic.FLOAT * adj.num_rows
    factors = scales if side == "scales" else traffic.FLOAT * adj.num_edges
    return {
        "ms": round(timing.ms, 5),
        "compulsory_tb_s": round(traffic.compulsory_bytes(adj, width, factors) / timing.ms / 1e9, 4),
        "gathered_tb_s": round(traffic.gathered_bytes(adj, width, factors) / timing.ms / 1e9, 4),
        **found,
        "sets": len(inputs.xs),
        "timing": timing.to_dict(),
    }


# ---- all cells ---------------------------------------------------------------------------------------


def run_shape(recorder: Recorder, shape: str, args: Namespace, handle: cusparse.Handle | None) -> None:
    """All widths of one shape."""
    matrix = recorder.prepare(f"graph {shape}", lambda: make_graph(shape, recorder.device, args.scale).adj.gcn())
    if matrix is None:
        return
    values = edge_values(matrix)
    recorder.say(f"{shape}: {matrix.num_rows:,} rows, {matrix.num_edges:,} entries")
    forms = row_orders.forms(recorder, shape, matrix, args.rows)
    for width in (int(text) for text in listed(args.features)):
        made: list[Inputs] = []

        def work(side: str, form: Adjacency | None, width: int = width, made: list[Inputs] = made) -> dict[str, Any]:
            if not made:
                made.append(Inputs(matrix, values, width, args.sets))
            return measure_cell(side, made[0], handle, args.cell_seconds, form)

        plan = row_orders.planned(matrix, width)
        for side in (side for side in SIDES if side in listed(args.sides)):
            key = {"shape": shape, "features": width, "side": side}
            if side == "cusparse":
                recorder.cell(key, partial(work, side, None))
                continue
            for order, form in forms.items():
                cell = recorder.cell({**key, "rows": order}, partial(work, side, form))
                cell["planned"] = order == plan or len(forms) == 1
        made.clear()


def ratios(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a shape, width and order of rows: milliseconds of each side and cuSPARSE's over Weft's."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        found.setdefault((cell["shape"], cell["features"]), []).append(cell)
    rows = []
    for (shape, width), here in found.items():
        for order in dict.fromkeys(cell["rows"] for cell in here if "rows" in cell) or [None]:
            inside = [cell for cell in here if cell["status"] == "ok" and cell.get("rows", order) == order]
            sides = {cell["side"]: cell for cell in inside}
            rows.append({"shape": shape, "features": width, "rows": order, **_row(sides), "sides": sides})
    return rows


def _row(sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ms = {side: sides[side]["ms"] if side in sides else None for side in SIDES}
    row: dict[str, Any] = {**ms, "planned": any(cell.get("planned") for cell in sides.values())}
    for side in ("scales", "weights"):
        row[f"{side}_ratio"] = ms["cusparse"] / ms[side] if ms["cusparse"] and ms[side] else None
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric mean and worst of cuSPARSE's time over Weft's, per form of the matrix: as planned, and by order."""
    found: dict[str, Any] = {}
    chosen = {"": [row for row in rows if row["planned"]]}
    chosen |= {f" by {order}": [row for row in rows if row["rows"] == order] for order in row_orders.ORDERS}
    for side in ("scales", "weights"):
        for label, inside in chosen.items():
            values = [row[f"{side}_ratio"] for row in inside if row[f"{side}_ratio"]]
            if values:
                mean = geometric_mean(values)
                found[side + label] = {"geometric_mean": mean, "worst": min(values), "cells": len(values)}
    return found


def print_report(recorder: Recorder) -> None:
    """The table: ms, ratios, achieved TB/s and errors."""
    rows = ratios(recorder.cells)
    header = ["shape", "F", "rows by", "cuSPARSE ms", "algorithm", "Weft ms", "ratio", "weighted ms", "ratio",
              "Weft TB/s compulsory", "gathered", "cuSPARSE gathered", "error"]  # fmt: skip
    table = []
    for row in rows:
        base, weft = row["sides"].get("cusparse", {}), row["sides"].get("scales", {})
        order = f"{row['rows']} (planned)" if row["planned"] else row["rows"]
        table.append([
            row["shape"], row["features"], order, row["cusparse"], base.get("algorithm"), row["scales"],
            row["scales_ratio"], row["weights"], row["weights_ratio"], weft.get("compulsory_tb_s"),
            weft.get("gathered_tb_s"), base.get("gathered_tb_s"), weft.get("error"),
        ])  # fmt: skip
    print_table(header, table)
    print(f"device copy: {recorder.about['copy_tb_s']:.3f} TB/s")
    recorder.save(summary=summary(rows))
    for side, found in recorder.about["summary"].items():
        print(f"{side}: geometric mean {found['geometric_mean']:.3f}x, worst {found['worst']:.3f}x")


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="pubmed,arxiv,products,reddit")
    parser.add_argument("--features", default="16,64,256,1024")
    parser.add_argument("--sides", default=",".join(SIDES))
    row_orders.add_option(parser)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    parser.add_argument("--cell-seconds", type=float, default=1.0, help="timed seconds of one variant")
    parser.add_argument("--sets", type=int, default=MOST_SETS, help="inputs to rotate among, where they fit")
    parser.add_argument("--sweep", action="store_true", help="try launch parameters instead")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    args = arguments()
    if args.sweep:
        from benchmarks.suites.kernels.spmm_sweep import sweep

        sweep(args)
        return
    recorder = Recorder("spmm", args)
    recorder.about["copy_tb_s"] = copy_bandwidth(recorder.device)
    handle = recorder.prepare("cuSPARSE", cusparse.Handle) if recorder.device.type == "cuda" else None
    if handle is not None:
        recorder.about["environment"]["cusparse"] = handle.version()
    for shape in listed(args.shapes):
        run_shape(recorder, shape, args, handle)
    print_report(recorder)


if __name__ == "__main__":
    main()
