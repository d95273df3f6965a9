"""Tables of users' modules, converted or in sweeps, and of relational models."""

from __future__ import annotations

from benchmarks.harness.results import Results
from benchmarks.report.markdown import Legend, ms, number, over, table, times

CONVERTED = {"gcn-jk": "GCN", "sage-jk": "GraphSAGE", "gin-jk": "GIN", "gat-jk": "GAT", "gat-drop": "GAT, dropout 0.5"}
SIDES_OF_PYG = {"pyg": "PyG's `RGCNConv`", "pyg-fast": "PyG's `FastRGCNConv`"}


def converted() -> str:
    """Layers of PyG kept, and converted."""
    results, legend, rows = Results.of("converted"), Legend(), []
    for cell in results.cells:
        if cell["status"] != "ok":
            continue
        name = cell["graph"].removeprefix("shape:").removeprefix("ogbn-")
        how = f"sampled, {cell['batch']:,} seeds" if cell["batch"] else "whole graph"
        left = " (not converted)" if cell["note"].startswith("not converted") else ""
        figures = [number(cell[f"{side}_ms"]) for side in ("kept", "converted")]
        mark = legend.mark(results, [cell])
        rows.append([name, how, CONVERTED[cell["module"]], *figures, times(cell["times"]) + left, mark])
    header = ["graph", "training", "module", "PyG's layers, ms", "Weft's layers, ms", "ratio", "run"]
    return f"{table(header, rows)}\n\n{legend.text()}"


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


def relations() -> str:
    """R-GCN over the whole graph, and PyG's two layers beside it."""
    results, legend, rows = Results.of("rgcn"), Legend(), []
    for weft in results.cells:
        if weft["side"] != "weft" or weft["mode"] != "full":
            continue
        key = {name: weft[name] for name in ("shape", "mode", "sharing")}
        every = ms(results.find(**key, side="weft-every-step"))
        row, used = [weft["shape"], weft["sharing"], ms(weft), every, number(weft["peak_gb"])], [weft]
        for side in SIDES_OF_PYG:
            peer = results.find(**key, side=side)
            used += [] if peer is None else [peer]
            row += ["-", "-"] if peer is None else [times(over(peer, weft)), number(peer["peak_gb"])]
        rows.append([*row, legend.mark(results, used)])
    more = [text for name in SIDES_OF_PYG.values() for text in (f"{name} over Weft", "GB")]
    header = ["shape", "weights", "Weft, ms", "every step", "GB", *more, "run"]
    return f"{table(header, rows)}\n\n{legend.text()}"
