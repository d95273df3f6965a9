"""Figures of whole runs: different structures, users' modules, the first minute, sampled epochs, CPU, papers100M."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.harness.results import Cell, Results
from benchmarks.harness.sampled_ratios import ratios
from benchmarks.report.markdown import (
    MODELS,
    Legend,
    kept,
    ms,
    not_yet,
    number,
    over,
    paragraph,
    percent,
    table,
    times,
)

CASES = {"depths": "GCN of 2, 2, 3, 4 layers, pubmed", "ten": "4 GCN, 4 GIN, 2 GAT of 3 layers, arxiv"}


def different() -> str:
    """Tasks of different structure, per epoch."""
    results, legend = Results.of("heterogeneous"), Legend()
    rows = []
    for case, name in CASES.items():
        cells = [results.find(case=case, side=side) for side in ("sequence", "stacks", "beside", "woven", "mps")]
        gains = " / ".join(times(over(cells[0], cell)) for cell in cells[1:])
        rows.append([name, *map(ms, cells), gains, legend.mark(results, cells)])
    header = ["tasks", "sequence", "stacks", "beside", "woven", "MPS", "sequence over the others", "run"]
    return f"{table(header, rows)}\n\n{legend.text()}"


def whole_runs() -> str:
    """The same as whole runs."""
    results = Results.of("heterogeneous")
    rows = []
    for case, name in CASES.items():
        apart, joined = (results.find(case=case, side=side) for side in ("runs", "run"))
        if apart is None or joined is None:
            continue
        ratio = apart["seconds"] / joined["seconds"]
        rows.append([name, joined["epochs"], number(apart["seconds"]), number(joined["seconds"]), times(ratio),
                     f"{number(joined['planning_seconds'], 2)} s, {percent(joined['analysis_share'])}"])  # fmt: skip
    return table(["tasks", "epochs", "one after another, s", "all at once, s", "ratio", "of it planning"], rows)


def weaving() -> str:
    """What weaving takes before the first epoch."""
    results = Results.of("heterogeneous")
    woven = [results.find(case=case, side="woven") for case in CASES]
    if not all(woven):
        return "Weaving was not measured in the newest run."
    about = results.runs[-1]["analysis"]
    matching = " and ".join(number(cell["matching_seconds"], 2) for cell in woven)
    enough = " and ".join(f"{about[case]['epochs_until_half_a_percent']:,}" for case in CASES)
    preparing = " and ".join(number(cell["preparing_seconds"], 2) for cell in woven)
    return paragraph(
        f"Weaving records the operators and matches them, {matching} s (0.5 % of {enough} such epochs), and compiles "
        f"its kernels: {preparing} s until the first epoch, the first one in a process that had compiled nothing."
    )


def compiled() -> str:
    """Modules of one's own."""
    results, legend = Results.of("compiled"), Legend()
    names = {"pyg-gcn": "PyG's GCN", "pyg-sage": "PyG's GraphSAGE, layer norm", "pyg-gin": "PyG's GIN, batch norm",
             "pyg-gat": "PyG's GAT, 4 heads", "chain": "chain", "chain-8": "chain, 8 stacked",
             "gcn": "built-in GCN"}  # fmt: skip
    rows = []
    for case, name in names.items():
        plain, fast = (results.find(case=case, side=side) for side in ("plain", "compiled"))
        if plain is None or fast is None:
            continue
        how = "" if plain["recorded"] else ", not recorded"
        saved = f"{number(plain['ms'] - fast['ms'])}: {number(fast['foreseen_saved_ms'])}"
        takes = number(fast["preparing_seconds"] - plain["preparing_seconds"], 2)
        if case == "gcn":
            saved = "0: 0"
        rows.append([name, ms(plain) + how, ms(fast), times(over(plain, fast)), saved, takes,
                     f"{number(plain['peak_gb'])} / {number(fast['peak_gb'])}",
                     legend.mark(results, [plain, fast])])  # fmt: skip
    header = ["module", "plain", "compiled", "ratio", "ms saved: predicted", "seconds to compile",
              "GB: plain / compiled", "run"]  # fmt: skip
    return f"{table(header, rows)}\n\n{legend.text()}"


# ---- wall clock --------------------------------------------------------------------------------------


def first_minute() -> str:
    """Whole runs from a fresh process on."""
    results = kept("first_minute")
    if results is None:
        return not_yet("first_minute")
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


def sampled_epoch() -> str:
    """Sampled training end to end."""
    results = kept("sampled_epoch")
    if results is None:
        return not_yet("sampled_epoch")
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


# ---- CPU ---------------------------------------------------------------------------------------------


def _cpu_seconds(results: Results, evaluated: str, side: str) -> list[float]:
    return [c["train_seconds"] for c in results.cells
            if c["evaluated"] == evaluated and c["side"] == side and c["turn"] != "warm-up"]  # fmt: skip


def _range(values: list[float]) -> str:
    inside = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
    return number(median(values)) + inside


def cpu() -> str:
    """Cora's GCN and a sweep, on two cores."""
    results, legend, rows = Results.of("cpu"), Legend(), []
    for evaluated in ("each epoch", "at the end"):
        weft, pyg = (_cpu_seconds(results, evaluated, side) for side in ("weft", "pyg"))
        ratio, run = times(median(pyg) / median(weft)), legend.mark(results, results.cells[:1])
        rows.append([f"one GCN, 200 epochs, evaluated {evaluated}", _range(weft), _range(pyg), ratio, len(weft), run])
    swept = Results.of("cpu_sweep")
    weft, pyg = (_timed_turns(swept, side) for side in ("weft", "pyg"))
    rows.append(["16 tasks, 40 epochs, evaluated each epoch", _range(weft), _range(pyg),
                 times(median(pyg) / median(weft)), len(weft), legend.mark(swept, swept.cells[:1])])  # fmt: skip
    header = ["Cora on a CPU", "Weft, s", "PyG, s", "ratio", "repeats", "run"]
    return f"{table(header, rows)}\n\n{legend.text()}"


def _timed_turns(results: Results, side: str) -> list[float]:
    return [c["train_seconds"] for c in results.cells if c["side"] == side and c["turn"] != "warm-up"]


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


# ---- papers100M --------------------------------------------------------------------------------------


def papers() -> str:
    """A forward pass over all of it."""
    results = Results.of("papers100m")
    by_phase: dict[str, Cell] = {cell["phase"]: cell for cell in results.cells}
    made, about = by_phase["generate"], results.runs[0]["forward_seconds"]
    peak = max(cell["peak_gb"] for cell in results.cells)
    return paragraph(
        f"{made['nodes']:,} nodes, {made['edges']:,} edges, {made['features']} half-precision features, generated on "
        f"the GPU in {number(made['phase_seconds'], 2)} s (peak {number(made['peak_gb'], 2)} GB); a forward pass of "
        f"a GCN of 3 layers, hidden 64, {made['classes']} classes, over all of it: {number(about['cold'], 2)} s the "
        f"first time, when kernels are compiled and rows sorted by length, {number(about['warm'], 2)} s after that; "
        f"peak {number(peak)} GB."
    )


def kept_files() -> str:
    """The index of results files."""
    from benchmarks.harness.results import FOLDER

    rows: list[list[Any]] = []
    for path in sorted(FOLDER.glob("*.json")):
        results = Results.read(path)
        dates = sorted(str(run.get("date"))[:16].replace("T", " ") for run in results.runs)
        devices = " and ".join(dict.fromkeys(str(run.get("device")) for run in results.runs))
        bad = sum(cell.get("status", "ok") != "ok" for cell in results.cells)
        rows.append([f"`{path.name}`", len(results.cells), bad, len(results.runs), dates[0], dates[-1], devices])
    return table(["file", "cells", "of them without a figure", "runs", "oldest", "newest", "device"], rows)
