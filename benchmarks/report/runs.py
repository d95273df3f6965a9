"""Figures of whole runs, users' modules, estimates, accuracies, queues and divided batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from statistics import mean, median, stdev
from typing import Any

from benchmarks.harness.recorder import find
from benchmarks.harness.results import FOLDER, Results
from benchmarks.queue_runs.tables import goals, team_verdicts
from benchmarks.report.markdown import (
    MISSING,
    MODELS,
    Legend,
    ms,
    number,
    over,
    paragraph,
    percent,
    table,
    times,
)
from benchmarks.suites import estimates as estimates_suite
from benchmarks.suites.division import Row, rows_of, verdicts
from benchmarks.suites.sampled_epoch import ratios

CASES = {"depths": "GCN of 2, 2, 3, 4 layers, pubmed", "ten": "4 GCN, 4 GIN, 2 GAT of 3 layers, arxiv"}


def different(results: Results) -> str:
    """Tasks of different structure, per epoch."""
    legend, rows = Legend(), []
    for case, name in CASES.items():
        sides = ("sequence", "stacks", "concurrent", "woven", "mps")
        cells = [results.find(case=case, side=side) for side in sides]
        gains = " / ".join(times(over(cells[0], cell)) for cell in cells[1:])
        rows.append([name, *map(ms, cells), gains, legend.mark(results, cells)])
    header = ["tasks", "sequence", "stacks", "concurrent", "woven", "MPS", "sequence over the others", "run"]
    return f"{table(header, rows)}\n\n{legend.text()}"


def whole_runs(results: Results) -> str:
    """The same as whole runs."""
    rows = []
    lengths = dict.fromkeys(cell["epochs"] for cell in results.cells if cell["side"] == "runs")
    for (case, name), epochs in itertools.product(CASES.items(), lengths):
        apart, joined = (results.find(case=case, side=side, epochs=epochs) for side in ("runs", "run"))
        if apart is None or joined is None:
            continue
        ratio = apart["seconds"] / joined["seconds"]
        rows.append([name, joined["epochs"], number(apart["seconds"]), number(joined["seconds"]), times(ratio)])
    return table(["tasks", "epochs", "one after another, s", "all at once, s", "ratio"], rows)


def first_minute(results: Results) -> str:
    """Whole runs from a fresh process on."""
    legend, rows = Legend(), []
    for shape, model in dict.fromkeys((cell["shape"], cell["model"]) for cell in results.cells):
        cells = [results.find(shape=shape, model=model, side=side) for side in ("cold", "disk", "pyg")]
        cold, disk, pyg = (cell or {} for cell in cells)
        inside = (number(disk.get(name)) for name in ("second_seconds", "epochs_seconds"))
        first = (f"{number(one.get('seconds'))} ({number(one.get('first_epoch_seconds'))})" for one in (cold, disk))
        rows.append([shape, MODELS[model], *first, *inside, number(pyg.get("seconds")),
                     " / ".join(number(one.get("process_seconds")) for one in (cold, disk, pyg)),
                     legend.mark(results, cells)])  # fmt: skip
    header = ["shape", "model", "nothing compiled, s (to the first epoch)", "kernels on disk, s (to the first epoch)",
              "second run in a process, s",
              "the epochs alone, s", "PyG eager, s", "whole process: cold / disk / PyG, s", "run"]  # fmt: skip
    return f"{table(header, rows)}\n\n{_reasons(results)}{legend.text()}"


def _reasons(results: Results) -> str:
    """A line per cell that has no figure."""
    said = [f"{' '.join(str(c[k]) for k in c if k in ('shape', 'model', 'case', 'side'))}: "
            f"{c.get('reason') or c.get('error')}" for c in results.cells if c.get("status", "ok") != "ok"]  # fmt: skip
    return paragraph("Without a figure: " + "; ".join(dict.fromkeys(said)) + ".") + "\n\n" if said else ""


def sampled_epoch(results: Results) -> str:
    """Sampled training end to end."""
    legend, rows = Legend(), []
    for cell in (cell for cell in results.cells if cell["status"] == "ok"):
        guess = "" if cell.get("extrapolated") is None else " *"
        rows.append([cell["shape"], {"weft": "Weft", "pyg": "PyG"}[cell["side"]], cell["case"], cell["tasks"],
                     cell["precision"], number(cell["ms"]), number(cell["epoch_seconds"]) + guess,
                     number(cell.get("predicted_seconds")), percent(cell.get("busy")),
                     percent(cell.get("feature_hit_rate")), number(cell.get("peak_gb")),
                     number(cell.get("predicted_gb")), legend.mark(results, [cell])])  # fmt: skip
    header = ["shape", "side", "case", "T", "precision", "ms per step", "epoch, s", "predicted, s", "GPU busy",
              "rows from the cache", "peak, GB", "predicted, GB", "run"]  # fmt: skip
    return f"{table(header, rows)}\n\n{_sampled_ratios(results)}{_reasons(results)}{legend.text()}"


def _sampled_ratios(results: Results) -> str:
    """What is asked of sampled epochs, and where the time of a step goes."""
    said = [f"{words} {times(ratio)}" for words, ratio in ratios(results.cells)]
    kernels = [_kernels_of(results, **about) for about in ({"case": "host, pipelined"}, {"case": "gpu", "tasks": 8})]
    return paragraph(f"Ratios: {'; '.join(said)}. {' '.join(kernels)}") + "\n\n" if said else ""


def _kernels_of(results: Results, **about: Any) -> str:
    """The longest kernels of a step."""
    cell = results.find(**{"shape": "products", "tasks": 1, "precision": "fp32", **about})
    if cell is None or not cell.get("kernels"):
        return ""
    longest = [f"`{name}` {number(ms)}" for name, ms in list(cell["kernels"].items())[:3]]
    return f"Longest kernels of a step of *{cell['case']}*, T = {cell['tasks']}, in ms: {', '.join(longest)}."


def _cpu_seconds(results: Results, evaluated: str, side: str) -> list[float]:
    cells = [c for c in results.cells if c["evaluated"] == evaluated and c["side"] == side and c["status"] == "ok"]
    return [c["train_seconds"] for c in cells if c["turn"] != "warm-up"]


def _range(values: list[float]) -> str:
    inside = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
    return number(median(values)) + inside


def cpu(results: Results) -> str:
    """Cora's GCN and a sweep, on two cores."""
    legend, rows = Legend(), []
    for evaluated in ("each epoch", "at the end"):
        weft, pyg = (_cpu_seconds(results, evaluated, side) for side in ("weft", "pyg"))
        if not weft or not pyg:
            continue
        ratio, run = times(median(pyg) / median(weft)), legend.mark(results, results.cells[:1])
        rows.append([f"one GCN, 200 epochs, evaluated {evaluated}", _range(weft), _range(pyg), ratio, len(weft), run])
    header = ["Cora on a CPU", "Weft, s", "PyG, s", "ratio", "repeats", "run"]
    return f"{table(header, rows)}\n\n{legend.text()}"


def _threads(results: Results) -> str:
    """Whether PyG's number of threads was chosen for it."""
    chosen = results.runs[0].get("pyg_threads")
    return f"PyG ran on {chosen} threads, its best." if chosen else "PyG was not given its best number of threads."


def cpu_sentence() -> str:
    """Cora on a CPU, with its spread."""
    results = Results.of("cpu")
    weft, pyg = (_cpu_seconds(results, "each epoch", side) for side in ("weft", "pyg"))
    return (
        f"On a {results.runs[0]['cores']}-core CPU, Cora's GCN of 200 epochs took "
        f"{_range(weft)} s against PyG's {_range(pyg)}: {times(median(pyg) / median(weft))} by the medians of "
        f"{len(weft)} runs. {_threads(results)}"
    )


def kept_files() -> str:
    """The index of results files."""
    rows: list[list[Any]] = []
    for path in sorted(FOLDER.glob("*.json")):
        results = Results.read(path)
        dates = sorted(str(run.get("date"))[:16].replace("T", " ") for run in results.runs)
        devices = " and ".join(dict.fromkeys(str(run.get("device")) for run in results.runs))
        bad = sum(cell.get("status", "ok") != "ok" for cell in results.cells)
        rows.append([f"`{path.name}`", len(results.cells), bad, len(results.runs), dates[0], dates[-1], devices])
    return table(["file", "cells", "of them without a figure", "runs", "oldest", "newest", "device"], rows)


def never_slower() -> str:
    """Sweeps of users' modules against the same tasks in turn, on a GPU and on a CPU."""
    both, legend, rows, worst = [Results.of("never_slower_gpu"), Results.of("never_slower")], Legend(), [], []
    graphs = [list(dict.fromkeys(cell["graph"] for cell in results.cells)) for results in both]
    marks = [legend.mark(results, results.cells) for results in both]
    for module in dict.fromkeys(cell["module"] for results in both for cell in results.cells):
        row = [module]
        for results, names in zip(both, graphs, strict=True):
            found = [results.find(module=module, graph=graph) for graph in names]
            row += ["-" if cell is None else times(cell["turn_over_sweep"]) for cell in found]
        rows.append(row)
    for results in both:
        ratios = [cell["turn_over_sweep"] for cell in results.cells if cell["status"] == "ok"]
        worst.append(f"{times(min(ratios))} in {len(ratios)} of {len(results.cells)} cells")
    header = ["module"]
    for place, names, mark in zip(("H200", "CPU"), graphs, marks, strict=True):
        header += [f"{place}, {name.removeprefix('shape:').removeprefix('ogbn-')} ({mark})" for name in names]
    told = f"Worst: {worst[0]} on the H200, {worst[1]} on the CPU."
    return f"{table(header, rows)}\n\n{told}\n\n{legend.text()}"


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
NEAR = 0.01  # what counts as a good estimate of memory


def _errors(about: dict[str, Any] | None) -> str:
    return f"{percent(about['worst'])}, {percent(about['median'])}" if about else MISSING


def estimates(results: Results) -> str:
    """Errors of memory and time by group."""
    groups, legend, rows = estimates_suite.groups(results.cells), Legend(), []
    for key, name in ((key, name) for key, name in GROUPS.items() if key in groups):
        one = groups[key]
        clock = one.get("time")
        before, after = (clock["before"], clock["after"]) if clock else (None, None)
        rows.append([name, one["cells"], _errors(one.get("allocated")), _errors(one.get("reserved")),
                     one.get("reserved", {}).get("below_with_margin", MISSING), one["timed_cells"], _errors(before),
                     _errors(after)])  # fmt: skip
    legend.mark(results, estimates_suite.usable(results.cells))
    header = ["trainings", "cells", "allocated: worst, median error", "reserved: worst, median", "below the bound",
              "timed cells", "epoch: worst, median", "calibrated: worst, median"]  # fmt: skip
    return f"{table(header, rows)}\n\n{legend.text()}"


def _near(cells: list[dict[str, Any]]) -> tuple[int, int]:
    errors = [abs(e) for e in (estimates_suite.error(cell, "allocated") for cell in cells) if e is not None]
    return sum(e <= NEAR for e in errors), len(errors)


def memory_sentence() -> str:
    """How many estimates were right, PyG's modules among them."""
    cells = estimates_suite.weighed(Results.of("estimates").cells)
    own = estimates_suite.library(cells)
    near, count = _near(own)
    theirs = _near([cell for cell in cells if cell not in own])
    return (
        f"Estimates of memory made without a GPU were within {percent(NEAR, 1)} of what {near} of {count} trainings of "
        f"Weft's own models and layers allocated, and {theirs[0]} of {theirs[1]} of users' and PyG's modules. The "
        "former were made after the measurements, with later code."
    )


def plan_table(results: Results) -> str:
    """The table of docs/plan.md."""
    groups = estimates_suite.groups(results.cells)
    own, theirs = groups["library"], groups["opaque T=1"]
    near, count = _near(estimates_suite.library(estimates_suite.weighed(results.cells)))

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


def estimate_takes(results: Results) -> str:
    """How long an estimate takes."""
    clocked = [cell["estimate_seconds"] for cell in estimates_suite.library(estimates_suite.timed(results.cells))]
    if not clocked:
        return ""
    many = results.runs[-1]["many"]
    middle = sorted(clocked)[len(clocked) // 2]
    return paragraph(
        f"An estimate took {number(middle, 2)} s (median), {number(max(clocked), 2)} s at most, PyG's modules aside, "
        f"which take a small real step the first time; {many['tasks']} tasks of one structure took "
        f"{number(many['seconds'])} s together."
    )


# ---- accuracy ----------------------------------------------------------------------------------------

ACCURATE = ("gcn", "sage", "gin", "gat")
TEN = range(10)


def _tests(results: Results, graph: str, model: str, side: str) -> list[float]:
    return [100 * c["test"] for c in results.cells if (c["graph"], c["model"], c["side"]) == (graph, model, side)
            and c["seed"] in TEN and c["status"] == "ok"]  # fmt: skip


def compared(results: Results, graph: str, model: str) -> dict[str, Any]:
    """Means and standard errors of both sides over ten seeds, and their distance in standard errors of it."""
    found: dict[str, Any] = {}
    for side in ("weft", "pyg"):
        tests = _tests(results, graph, model, side)
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


def accuracy(results: Results) -> str:
    """Ten seeds of every graph and model."""
    legend = Legend()
    graphs = list(dict.fromkeys(cell["graph"] for cell in results.cells))
    found = {(graph, model): compared(results, graph, model) for graph in graphs for model in ACCURATE}
    rows = [[graph, *(shown(found[graph, model]) for model in ACCURATE)] for graph in graphs]
    near = f"{_near_pyg(found.values())} lie within two standard errors."
    legend.mark(results, results.cells)
    header = ["graph", "GCN: Weft, PyG", *(MODELS[model] for model in ACCURATE[1:])]
    return f"{table(header, rows)}\n\n{near}\n\n{legend.text()}"


def accuracy_sentence() -> str:
    """In one sentence."""
    results = Results.of("accuracy")
    graphs = dict.fromkeys(cell["graph"] for cell in results.cells)
    found = [compared(results, graph, model) for graph in graphs for model in ACCURATE]
    return (
        f"Trained accuracies agree with PyG's within two standard errors in {_near_pyg(found)} pairs of graph and "
        "model, ten seeds each."
    )


def _near_pyg(found: Iterable[dict[str, Any]]) -> str:
    apart = [one["apart"] for one in found if "apart" in one]
    return f"{sum(one <= 2 for one in apart)} of {len(apart)}"


MODES = {
    "pyg": "PyG, one by one",
    "pipeswitch": "one at a time (`pipeswitch`)",
    "backfill": "`backfill`",
    "lmcf": "`lmcf`",
    "bmc": "`bmc`",
    "base": "`base`",
    "mps": "`mps`",
}


def queues(results: Results) -> str:
    """Makespan, mean completion and mean wait of every queue in every mode."""
    legend, rows = Legend(), []
    for name in _names(results):
        found = [find(results.cells, queue=name, mode=mode) for mode in MODES]
        rows.append([name, *map(_times, found), legend.mark(results, found)])
    return f"{table(['queue', *MODES.values(), 'run'], rows, MODES.values())}\n\n{legend.text()}"


def queue_use(results: Results) -> str:
    """How busy the device was, and the bytes."""
    rows = []
    for name in _names(results):
        found = [find(results.cells, queue=name, mode=mode) for mode in MODES]
        rows.append([name, *(percent((cell or {}).get("utilisation")) for cell in found)])
    return table(["queue", *MODES.values()], rows, MODES.values())


def queue_goals(results: Results) -> str:
    """What was wanted of the default policy and of the simulator, and found on the queues."""
    header = ["goal", "wanted", "worst", "on", "of all queues", "verdict"]
    return table(header, goals(results.cells, _names(results)))


def queue_epochs(results: Results) -> str:
    """CoGNN's queues at 200 epochs, and overheads in epochs of a queue."""
    legend, rows = Legend(), []
    longest = max((cell["epochs"] for cell in results.cells), default=0)
    for queue, workers, mode in dict.fromkeys((cell["queue"], cell["workers"], cell["mode"]) for cell in results.cells):
        here = [c for c in results.cells if (c["queue"], c["workers"], c["mode"]) == (queue, workers, mode)]
        good = {cell["epochs"]: cell for cell in here if cell["status"] == "ok" and not cell["failed"]}
        why = [cell.get("error") or cell.get("reason") or f"{len(cell['failed'])} tasks failed"
               for cell in here if cell["epochs"] not in good]  # fmt: skip
        short, whole = good.get(min(good, default=0)), good.get(longest)
        if short and whole and longest > min(good) and whole["makespan"] <= short["makespan"]:
            why = [f"{longest} epochs took no longer than {min(good)}"]
        if why or len(good) < 2 or short is None or whole is None:
            rows.append([queue, workers, f"`{mode}`", f"no figure: {'; '.join(why)}", *[MISSING] * 5, ""])
            continue
        epoch = (whole["makespan"] - short["makespan"]) / (longest - min(good))
        overhead = short["makespan"] - min(good) * epoch
        # A server that is started later finds the estimates of the one before.
        planning = max(cell.get("planning_seconds", 0.0) for cell in results.cells if cell["queue"] == queue)
        rows.append([
            queue, workers, f"`{mode}`", _times(whole), percent(whole.get("utilisation")), f"{1e3 * epoch:.3g} ms",
            number(overhead / epoch), number(planning / epoch), whole["out_of_memory"],
            legend.mark(results, [short, whole]),
        ])  # fmt: skip
    header = ["queue", "workers", "policy", "makespan / completion / wait, s", "busy", "one epoch of the queue",
              "starts and scheduling, epochs", "planning, epochs", "out of memory", "run"]  # fmt: skip
    return f"{table(header, rows)}\n\n{legend.text()}"


TEAM_MODES = {
    "backfill": "`backfill`",
    "unfused": "`backfill`, nothing fused",
    "lmcf": "`lmcf`",
    "sequential": "one at a time (`sequential`)",
    "pyg-mps": "PyG, as many processes, MPS",
}


def team_queue(results: Results) -> str:
    """The team's queue in every mode."""
    legend, rows = Legend(), []
    for mode, words in TEAM_MODES.items():
        cell = results.find(mode=mode)
        if cell is None:
            continue
        whole = cell.get("budget_bytes", 0) + cell.get("reserved_bytes", 0)
        peak = cell.get("device_peak_bytes")
        held = MISSING if peak is None else number(peak / 2**30)
        held += f" of {number(whole / 2**30)}" if whole else ""
        answers = [MISSING if cell[key] is None else number(cell[key]) for key in ("answer_median", "answer_p95")]
        cold = "" if cell.get("warmed", True) else ", not all kernels compiled before"
        rows.append([
            words + cold, number(cell["makespan"]), f"{number(cell['mean_jct'])} / {number(cell['p95_jct'])}",
            f"{number(cell['mean_wait'])} / {number(cell['p95_wait'])}", percent(cell.get("utilisation")), held,
            f"{cell['tasks']} in {cell['groups']}", " / ".join(answers), cell["out_of_memory"], len(cell["failed"]),
            legend.mark(results, [cell]),
        ])  # fmt: skip
    header = ["mode", "makespan, s", "JCT of a job, mean / p95, s", "wait of a task, mean / p95, s", "busy",
              "peak, GiB", "trainings in groups", "answers, median / p95, s", "out of memory", "failed",
              "run"]  # fmt: skip
    return f"{table(header, rows)}\n\n{legend.text()}"


def team_goals(results: Results) -> str:
    """What was wanted of the team's queue, and found."""
    return table(["goal", "wanted", "found", "verdict"], team_verdicts(results.cells))


def _names(results: Results) -> list[str]:
    return list(dict.fromkeys(str(cell["queue"]) for cell in results.cells))


def _times(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return MISSING
    return " / ".join(number(cell[key]) for key in ("makespan", "mean_jct", "mean_queuing"))


def division(results: Results) -> str:
    """Milliseconds per batch of both sides alone and of Weft's division."""
    good, legend = [cell for cell in results.cells if cell["status"] == "ok"], Legend()
    rows = [[*_sides(row), legend.mark(results, [row.weft])] for row in rows_of(good)]
    header = ["shape, model", "GiB", "workers", "host alone", "GPU alone", "Weft", "share of the GPU",
              "better side / Weft", "simulated", "CPU, PCIe, GPU busy", "run"]  # fmt: skip
    return f"{table(header, rows, ['GiB'])}\n\n{legend.text()}"


def division_goals(results: Results) -> str:
    """What was to be shown of dividing, and what was found."""
    return table(["to be shown", "", "found"], verdicts([cell for cell in results.cells if cell["status"] == "ok"]))


def _sides(row: Row) -> list[str]:
    weft, error = row.weft, row.weft.get("error")
    shares = list((weft.get("busy") or {}).values())
    busy = [percent(share) for share in shares if any(shares)]  # all zero: the profiler saw nothing
    return [
        f"{row.shape}, {MODELS[row.model]}", MISSING if row.budget is None else f"{row.budget:g}", str(row.workers),
        number(row.host["ms_per_batch"]) if row.host else MISSING, number(row.device["ms_per_batch"]),
        number(weft["ms_per_batch"]), _share(weft) + ("" if row.as_planned else ", not planned"), times(row.gain),
        MISSING if error is None else f"{100 * error:+.0f} %", ", ".join(busy) or MISSING,
    ]  # fmt: skip


def _share(cell: dict[str, Any]) -> str:
    """The share of the batches that the GPU prepares, and how."""
    share, way = cell.get("device_share"), cell.get("division") or {}
    if share is None:
        return "all on the GPU"
    divided = 0 < share < 1
    inside = way.get("strategy", "elastic") == "elastic" and way.get("in_step", True)
    return number(share, 2) + (", inside of steps" if inside else ", fixed") * divided
