"""Figures of estimates and of trained accuracies."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import Any

from benchmarks.harness.results import Results
from benchmarks.report.markdown import MISSING, MODELS, Legend, number, paragraph, percent, table
from benchmarks.suites.prediction import estimates_report as report

GROUPS = {
    "queues T=1": "queues, T = 1",
    "queues T=4": "queues, T = 4",
    "queues T=16": "queues, T = 16",
    "modules T=1": "modules, T = 1",
    "modules T=4": "modules, T = 4",
    "modules T=16": "modules, T = 16",
    "library": "all of these",
    "opaque T=1": "PyG modules",
    "users T=1": "users' modules, T = 1",
    "users T=4": "users' modules, T = 4",
    "users T=6": "users' modules, T = 6",
    "users T=16": "users' modules, T = 16",
    "all": "all",
}
APART = ("opaque", "users")  # modules that somebody else wrote
NEAR = 0.01  # what counts as a good estimate of memory


def _summary() -> tuple[Results, dict[str, Any]]:
    results = Results.of("estimates")
    found = report.summary(results.cells)["groups"]
    everything = report.usable(results.cells)
    after = dict(zip(map(id, results.cells), report.calibrated(results.cells), strict=True))
    library = report._group(_library(everything), after)
    return results, {**found, "library": library, "all": report._group(everything, after)}


def _library(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of Weft's own models and layers."""
    return [cell for cell in cells if cell["set"] not in APART]


def _errors(about: dict[str, Any] | None) -> str:
    return f"{percent(about['worst'])}, {percent(about['median'])}" if about else MISSING


def estimates() -> str:
    """Errors of memory and time by group."""
    results, groups = _summary()
    legend, rows = Legend(), []
    for key, name in GROUPS.items():
        one = groups[key]
        clock = one.get("time")
        before, after = (clock["before"], clock["after"]) if clock else (None, None)
        rows.append([name, one["cells"], _errors(one.get("allocated")), _errors(one.get("reserved")),
                     one["reserved"]["below_with_margin"], one["timed_cells"], _errors(before),
                     _errors(after)])  # fmt: skip
    legend.mark(results, report.usable(results.cells))
    header = ["trainings", "cells", "allocated: worst, median error", "reserved: worst, median", "below the bound",
              "timed cells", "epoch: worst, median", "calibrated: worst, median"]  # fmt: skip
    return f"{table(header, rows)}\n\n{legend.text()}"


def _near(cells: list[dict[str, Any]]) -> tuple[int, int]:
    errors = [abs(e) for e in (report.error(cell, "allocated") for cell in cells) if e is not None]
    return sum(e <= NEAR for e in errors), len(errors)


def memory_sentence() -> str:
    """How many estimates were right, PyG's modules among them."""
    cells = report.weighed(Results.of("estimates").cells)
    near, count = _near(_library(cells))
    theirs = _near([cell for cell in cells if cell["set"] in APART])
    return (
        f"Estimates of memory made without a GPU were within {percent(NEAR, 1)} of what {near} of {count} trainings of "
        f"Weft's own models and layers allocated, and {theirs[0]} of {theirs[1]} of users' and PyG's modules. The "
        "former were made after the measurements, with later code."
    )


def plan_table() -> str:
    """The table of docs/plan.md."""
    results, groups = _summary()
    own, theirs = groups["library"], groups["opaque T=1"]
    near, count = _near(_library(report.weighed(results.cells)))

    def clock(one: dict[str, Any], when: str) -> str:
        about = one["time"][when]
        rank = f"{about['spearman']:.3f}"
        return f"median error {percent(about['median'])}, worst {percent(about['worst'])}, rank correlation {rank}"

    def bound(one: dict[str, Any], name: str) -> str:
        about = one[name]
        return f"median error {percent(about['median'])}, worst {percent(about['worst'])}"

    allocated = f"{bound(own, 'allocated')}; {near} of {count} within {percent(NEAR, 1)}"
    reserved = f"{bound(own, 'reserved')}; {own['reserved']['below_with_margin']} beyond the stated bound"
    rows = [["`max_memory_allocated`", allocated, bound(theirs, "allocated")],
            ["`max_memory_reserved`", reserved, bound(theirs, "reserved")],
            [f"epoch ({own['timed_cells']} and {theirs['timed_cells']} timed)", clock(own, "before"),
             clock(theirs, "before")],
            ["epoch, calibrated with the other half", clock(own, "after"), clock(theirs, "after")]]  # fmt: skip
    header = ["", f"{own['cells']} trainings of Weft's own models", f"{theirs['cells']} of PyG's modules"]
    return table(header, rows)


def estimate_takes() -> str:
    """How long an estimate takes."""
    results = Results.of("estimates")
    clocked = [cell["estimate_seconds"] for cell in _library(report.timed(results.cells))]
    many = results.runs[-1]["many"]
    middle = sorted(clocked)[len(clocked) // 2]
    return paragraph(
        f"An estimate took {number(middle, 2)} s (median), {number(max(clocked), 2)} s at most, PyG's modules aside, "
        f"which take a small real step the first time; {many['tasks']} tasks of one structure took "
        f"{number(many['seconds'])} s together."
    )


# ---- accuracy ----------------------------------------------------------------------------------------

GRAPHS = ("cora", "citeseer", "facebook", "squirrel", "twitch_de")
TEN = range(10)


def _tests(results: Results, graph: str, model: str, side: str, seeds: range) -> list[float]:
    return [100 * c["test"] for c in results.cells if (c["graph"], c["model"], c["side"]) == (graph, model, side)
            and c["seed"] in seeds and c["status"] == "ok"]  # fmt: skip


def compared(results: Results, graph: str, model: str, seeds: range = TEN, mine: str = "weft") -> dict[str, Any]:
    """Means and standard errors of both sides (Weft's called ``mine``), and the distance in standard errors of it."""
    found: dict[str, Any] = {}
    for side, name in (("weft", mine), ("pyg", "pyg")):
        tests = _tests(results, graph, model, name, seeds)
        if len(tests) > 1:
            found[side] = (mean(tests), stdev(tests) / math.sqrt(len(tests)))
    if len(found) == 2:
        joint = math.hypot(found["weft"][1], found["pyg"][1])
        gap = abs(found["weft"][0] - found["pyg"][0])
        found["apart"] = gap / joint if joint else 0.0
    return found


def shown(found: dict[str, Any]) -> str:
    parts = [f"{value:.2f} ± {error:.2f}" for value, error in (found[s] for s in ("weft", "pyg") if s in found)]
    if "apart" not in found:
        return ", ".join(parts)
    return f"{', '.join(parts)} ({found['apart']:.1f})" if found["apart"] else f"{', '.join(parts)} (equal)"


def accuracy() -> str:
    """Ten seeds of every graph and model."""
    results, legend = Results.of("accuracy"), Legend()
    rows = [[graph, *(shown(compared(results, graph, model)) for model in ("gcn", "sage", "gin", "gat"))]
            for graph in GRAPHS]  # fmt: skip
    apart = [compared(results, graph, model)["apart"] for graph in GRAPHS for model in ("gcn", "sage", "gin", "gat")]
    near = f"{sum(one <= 2 for one in apart)} of {len(apart)} lie within two standard errors."
    legend.mark(results, results.cells)
    header = ["graph", "GCN: Weft, PyG", *(MODELS[model] for model in ("sage", "gin", "gat"))]
    return f"{table(header, rows)}\n\n{near}\n\n{legend.text()}"


def accuracy_more() -> str:
    """The same with other seeds."""
    results = Results.of("accuracy")
    more = [("facebook", "gcn", range(10, 40)), ("citeseer", "gcn", range(10, 40)), ("cora", "gat", range(30))]
    rows = [[graph, MODELS[model], f"{seeds.start} to {seeds.stop - 1}",
             shown({k: v for k, v in compared(results, graph, model, seeds).items()
                     if len(_tests(results, graph, model, "pyg", seeds)) == len(seeds) or k == "weft"})]
            for graph, model, seeds in more]  # fmt: skip
    return table(["graph", "model", "seeds", "Weft, PyG"], rows)


def accuracy_sentence() -> str:
    """In one sentence."""
    results = Results.of("accuracy")
    apart = [compared(results, graph, model)["apart"] for graph in GRAPHS for model in ("gcn", "sage", "gin", "gat")]
    return (
        f"Trained accuracies agree with PyG's within two standard errors in {sum(one <= 2 for one in apart)} of "
        f"{len(apart)} pairs of graph and model, ten seeds each."
    )
