"""Figures of sampled training beside PyG's NeighborLoader: time on a CPU, and accuracy."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.results import Results
from benchmarks.report.markdown import MODELS, Legend, kept, not_yet, number, table, times
from benchmarks.report.planning import TEN, compared, shown

GRAPHS = ("facebook", "squirrel")
SIDES = {"weft": "Weft", "pyg": "PyG NeighborLoader"}


def neighbor_loader() -> str:
    """Sampling alone and whole steps, each side with its best number of workers."""
    results = kept("neighbor_loader")
    if results is None:
        return not_yet("neighbor_loader")
    from benchmarks.suites.neighbor_loader import summary

    legend, rows = Legend(), []
    run = legend.mark(results, results.cells[:1])
    for row in summary(results.cells, _steps(results)):
        for side in SIDES:
            rows.append([*_cells(row, side), times(row["ratio"]) if side == "pyg" else "", run])
    header = ["work", "side", "workers", "ms per batch (range)", "processor ms", "batches/s", "M edges/s",
              "epoch, s (extrapolated)", "over Weft", "run"]  # fmt: skip
    return f"{table(header, rows)}\n\n{legend.text()}"


def _steps(results: Results) -> int:
    return int(results.runs[-1]["steps_per_epoch"])


def _cells(row: dict[str, Any], side: str) -> list[str]:
    one = row.get(side)
    if one is None:
        return [row["work"], SIDES[side], *["-"] * 6]
    spread = f"{number(one['ms'])} ({number(one['low'])} to {number(one['high'])})"
    # Of worker processes no processor time is known.
    cpu = "-" if side == "pyg" and one["workers"] else number(one["cpu_ms"])
    return [row["work"], SIDES[side], str(one["workers"]), spread, cpu, number(one.get("batches_s")),
            number(one.get("mega_edges_s")), number(one["epoch_seconds"])]  # fmt: skip


def sampled_accuracy() -> str:
    """All seeds of both graphs and models."""
    results = kept("sampled_accuracy")
    if results is None:
        return not_yet("sampled_accuracy")
    legend, rows = Legend(), []
    for graph in GRAPHS:
        for side, name in (("weft", "Weft's sampler"), ("fed", "NeighborLoader")):
            found = [compared(results, graph, model, TEN, side) for model in ("gcn", "sage")]
            rows.append([graph, name, "0 to 9", *map(shown, found)])
        more = [c["seed"] for c in results.cells if c["graph"] == graph and c["seed"] not in TEN]
        if more:  # of GCN alone
            others = range(min(more), max(more) + 1)
            for side, name in (("weft", "Weft's sampler"), ("fed", "NeighborLoader")):
                found = compared(results, graph, "gcn", others, side)
                rows.append([graph, name, f"{others.start} to {others.stop - 1}", shown(found), "-"])
    legend.mark(results, results.cells)
    header = ["graph", "Weft's batches from", "seeds", *(f"{MODELS[model]}: Weft, PyG" for model in ("gcn", "sage"))]
    return f"{table(header, rows)}\n\n{legend.text()}"
