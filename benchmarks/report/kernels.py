"""Figures of kernels: SpMM, one attention layer, kernels of many tasks, sampling and gathering."""

from __future__ import annotations

from functools import partial
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.results import Cell, Results
from benchmarks.report.markdown import MODELS, Legend, kept, ms, not_yet, number, over, paragraph, table, times

SHAPES = ("pubmed", "arxiv", "products", "reddit")


def _spmm_rows(results: Results) -> list[dict[str, Any]]:
    """Per shape and width: cuSPARSE's cell, Weft's by the order that a plan would take, and by length."""
    widths = sorted({cell["features"] for cell in results.cells})
    rows = []
    for shape, width in ((shape, width) for shape in SHAPES for width in widths):
        here = {"shape": shape, "features": width}
        orders = [results.find(**here, side="scales", rows=order) for order in ("cluster", "length")]
        measured = [cell for cell in orders if cell]
        base = results.find(**here, side="cusparse")
        if base and measured:
            planned = next((cell for cell in measured if cell.get("planned")), measured[-1])
            rows.append({**here, "base": base, "weft": planned, "length": orders[1]})
    return rows


def spmm() -> str:
    """Against cuSPARSE."""
    results, legend = Results.of("spmm"), Legend()
    rows = []
    for row in _spmm_rows(results):
        base, weft = row["base"], row["weft"]
        other = "" if row["length"] is weft or row["length"] is None else f", by length {number(row['length']['ms'])}"
        rows.append([row["shape"], row["features"], ms(base), ms(weft) + other, times(over(base, weft)),
                     number(weft["gathered_tb_s"], 2), legend.mark(results, [base, weft])])  # fmt: skip
    ratios = [over(row["base"], row["weft"]) for row in _spmm_rows(results)]
    mean = f"Geometric mean {times(geometric_mean(ratios))}, worst {times(min(ratios))}."
    header = ["shape", "F", "cuSPARSE", "Weft", "ratio", "TB/s", "run"]
    return f"{table(header, rows)}\n\n{mean}\n\n{legend.text()}"


def spmm_sentence() -> str:
    """The range."""
    ratios = [over(row["base"], row["weft"]) for row in _spmm_rows(Results.of("spmm"))]
    return (
        f"For SpMM alone cuSPARSE's best algorithm takes {number(min(ratios))} to {number(max(ratios))} times as long "
        f"as Weft (geometric mean {number(geometric_mean(ratios))}, {len(ratios)} cells)."
    )


def clusters() -> str:
    """What taking rows by cluster is worth, and takes."""
    results = Results.of("spmm")
    gains = []
    for cell in results.cells:
        here = {"shape": cell["shape"], "features": cell["features"], "side": "scales"}
        if cell.get("rows") == "cluster" and cell["side"] == "scales":
            length = results.find(**here, rows="length")
            saved = 100 * (1 - cell["ms"] / length["ms"])
            gains.append(f"{cell['shape']} at {cell['features']} columns {number(saved, 2)} %")
    orders = next(run["row_orders"] for run in reversed(results.runs) if run.get("row_orders"))
    takes = ", ".join(f"{number(1e3 * one['seconds'], 2)} ms on {shape}" for shape, one in orders.items())
    first = max(one["first_seconds"] for one in orders.values())
    return paragraph(
        f"Time saved by rows in the order of clusters: {', '.join(gains)}. Finding the clusters takes {takes}, "
        f"{number(first, 2)} s the first time in a process that has to compile a kernel for it."
    )


def attention() -> str:
    """One layer, forward and backward."""
    results, legend = Results.of("attention"), Legend()
    rows = []
    for model in ("gat", "gatv2"):
        for dropout in (0.0, 0.5):
            here = {"model": model, "dropout": dropout}
            weft, compiled, eager = (results.find(**here, side=s) for s in ("weft-replayed", "compiled", "pyg"))
            if weft is None or compiled is None:
                continue
            held = " / ".join(number(cell["added_gb"], 2) for cell in (weft, compiled))
            rows.append([MODELS[model], dropout, ms(weft), ms(compiled), ms(eager), times(over(compiled, weft)), held,
                         legend.mark(results, [weft, compiled])])  # fmt: skip
    header = ["layer", "dropout", "Weft", "PyG compiled", "PyG eager", "over compiled",
              "GB added by the pass: Weft / compiled", "run"]  # fmt: skip
    return f"{table(header, rows)}\n\n{legend.text()}"


# ---- many tasks --------------------------------------------------------------------------------------


def multi_kernels() -> str:
    """One SpMM of T tasks."""
    results, legend = Results.of("multi_kernels"), Legend()
    rows = []
    for tasks in sorted({cell["tasks"] for cell in results.cells if cell["part"] == "widths"}):
        here = {"part": "widths", "tasks": tasks}
        cluster, length = (results.find(**here, side="batched", rows=order) for order in ("cluster", "length"))
        wide, separate = (results.find(**here, side=side) for side in ("wide", "separate"))
        if cluster is None:
            continue
        rows.append([tasks, ms(cluster), ms(length), ms(wide), ms(separate), times(over(wide, cluster)),
                     times(over(separate, cluster)), number(cluster["ms_a_task"]), number(cluster["gathered_tb_s"], 2),
                     legend.mark(results, [cluster, length, wide, separate])])  # fmt: skip
    header = ["T", "Weft, rows by cluster", "rows by length", "one wide cuSPARSE", "T of cuSPARSE", "over wide",
              "over separate", "ms per task", "TB/s", "run"]  # fmt: skip
    return f"{table(header, rows)}\n\n{legend.text()}"


def directions() -> str:
    """Forward and backward products in one launch."""
    results = Results.of("multi_kernels")
    names = {"separate": "six kernels one after another", "stacked": "stacked by direction",
             "joined": "all in one launch", "pull-push": "pulled and pushed over one structure",
             "cusparse": "six of cuSPARSE"}  # fmt: skip
    apart = results.find(part="passes", side="separate")
    rows = []
    for side, name in names.items():
        cell = results.find(part="passes", side=side)
        rows.append([name, ms(cell), times(over(apart, cell))])
    return table(["three forward and three backward products", "ms", "over six kernels"], rows)


# ---- sampling ----------------------------------------------------------------------------------------


def sampling() -> str:
    """Sampling and gathering."""
    results = kept("sampling")
    if results is None:
        return not_yet("sampling")
    legend, rows = Legend(), []
    for cell in results.cells:
        size = f"{cell.get('seeds') or cell.get('rows'):,}"
        rate = _rate(cell)
        launched = number(cell.get("launched_ms"))
        rows.append([cell["work"], cell["side"], size, cell.get("fanout", ""), ms(cell), launched, rate,
                     legend.mark(results, [cell])])  # fmt: skip
    reasons = [f"{c['side']}: {c['reason']}." for c in results.cells if c.get("reason")]
    header = ["work", "side", "seeds or rows", "fan-out", "ms", "ms launched", "rate", "run"]
    compared = [paragraph(text) for text in map(partial(_one_hop, results), (10, 15, 30)) if text]
    return "\n\n".join([table(header, rows), *map(paragraph, reasons), *compared, legend.text()])


def _one_hop(results: Results, fanout: int) -> str:
    """The samplers of one hop beside the reservoir, and the default beside reading its picks alone."""
    cells = {c["side"]: c for c in results.cells if c["work"] == "one hop" and c["fanout"] == fanout and c.get("ms")}
    base, least, ours = cells.get("reservoir"), cells.get("picks alone"), cells.get("default")
    if base is None or least is None or ours is None:
        return ""
    threads = [side for side in cells if side.startswith("paper, threads")]
    sides = [*(side for side in ("default", "paper", "paper, classes") if side in cells),
             *sorted(threads, key=lambda side: cells[side]["ms"])[:1]]  # fmt: skip
    gains = ", ".join(f"{side} {times(over(base, cells[side]))}" for side in sides)
    return (
        f"Fan-out {fanout}, the reservoir's time over that of others: {gains}. The default takes "
        f"{times(over(ours, least))} the time of reading its picks alone, so none could exceed "
        f"{times(over(base, least))}."
    )


def _rate(cell: Cell) -> str:
    if cell.get("gb_s"):
        return f"{number(cell['gb_s'])} GB/s"
    if cell.get("giga_edges_s"):
        return f"{number(cell['giga_edges_s'])} G edges/s"
    return f"{number(cell['mega_edges_s'])} M edges/s" if cell.get("mega_edges_s") else ""
