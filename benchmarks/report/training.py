"""Figures of training: one epoch, sweeps, and the short table of the README."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.results import Cell, Results
from benchmarks.report.markdown import (
    MISSING,
    MODELS,
    Legend,
    best_of,
    bullets,
    kept,
    ms,
    ms_in_words,
    number,
    over,
    paragraph,
    table,
    times,
)
from benchmarks.suites.epoch import BASELINES, COMPILED_SIDES, PYG_SIDES

NAMES = {
    "pyg": "PyG eager",
    "adj_t": "PyG adj_t",
    "compiled": "PyG compiled",
    "compiled-graphs": "PyG compiled, model replayed",
    "captured": "PyG compiled, step captured",
    "cusparse": "cuSPARSE eager",
    "cusparse-captured": "cuSPARSE, step captured",
}
ALONE = "Weft, `A X` in every step"
# Columns that a table does without until somebody has measured them.
OPTIONAL = (ALONE, *(f"{before}{NAMES[side]}" for side in ("adj_t", "compiled-graphs") for before in ("", "over ")))
SHAPES = ("cora", "pubmed", "arxiv", "products")
VARIES = 1.1  # baselines whose runs differ by more are listed


def _epochs() -> list[tuple[str, str]]:
    return [(shape, model) for shape in SHAPES for model in ("gcn", "sage", "gin", "gat")]


def epoch() -> str:
    """Milliseconds of every side."""
    results, legend = Results.of("epoch"), Legend()
    rows = []
    for shape, model in _epochs():
        here = {"shape": shape, "model": model}
        cells = [results.any(**here, side=side) for side in ("weft", "weft-every-step", *BASELINES)]
        rows.append([shape, MODELS[model], *map(ms, cells), legend.mark(results, cells)])
    header = ["shape", "model", "Weft", ALONE, *(NAMES[side] for side in BASELINES), "run"]
    return f"{table(header, rows, OPTIONAL)}\n\n{legend.text()}"


def epoch_ratios() -> str:
    """Every baseline's time over Weft's."""
    results = Results.of("epoch")
    rows = []
    for shape, model in _epochs():
        here = {"shape": shape, "model": model}
        weft = results.find(**here, side="weft")
        found = {side: results.find(**here, side=side) for side in BASELINES}
        best = best_of(found.values())
        name = NAMES[best["side"]] if best else MISSING
        ratios = [times(over(cell, weft)) for cell in found.values()]
        rows.append([shape, MODELS[model], *ratios, f"{times(over(best, weft))} ({name})"])
    return table(["shape", "model", *(NAMES[side] for side in BASELINES), "best baseline"], rows, OPTIONAL)


def epoch_memory() -> str:
    """Peak GB of an epoch; what a replayed model holds does not show in the allocator's mark."""
    results = Results.of("epoch")
    sides = ("weft", *(side for side in BASELINES if side != "compiled-graphs"))
    rows = []
    for shape, model in _epochs():
        cells = [results.find(shape=shape, model=model, side=side) or {} for side in sides]
        if shape in ("arxiv", "products"):
            rows.append([shape, MODELS[model], *(number(cell.get("peak_gb")) for cell in cells)])
    return table(["shape", "model", "Weft", *(NAMES[side] for side in sides[1:])], rows, OPTIONAL)


def baselines_vary() -> str:
    """Baselines that took different times in different runs."""
    found = []
    for suite in ("epoch", "sweep"):
        for cell in Results.of(suite).cells:
            runs = [cell["ms"], *cell["earlier_ms"]] if cell.get("earlier_ms") else []
            if runs and max(runs) / min(runs) > VARIES and cell["side"] in NAMES:
                values = ", ".join(number(value) for value in runs)
                found.append([suite, cell["shape"], MODELS[cell["model"]], NAMES[cell["side"]], values])
    return table(["suite", "shape", "model", "side", "ms, the newest run first"], found)


# ---- sweeps ------------------------------------------------------------------------------------------


def _sweeps(results: Results) -> list[Cell]:
    """Weft's largest sweep of each shape, model and precision."""
    largest: dict[tuple[str, str, str], Cell] = {}
    for cell in results.cells:
        key = (cell["shape"], cell["model"], cell["precision"])
        if cell["side"] == "weft" and cell["status"] == "ok" and cell["tasks"] > 1:
            largest[key] = max(cell, largest.get(key, cell), key=lambda one: one["tasks"])
    order = {"fp32": 0, "tf32": 1, "bf16": 2}
    return sorted(largest.values(), key=lambda c: (SHAPES.index(c["shape"]), list(MODELS).index(c["model"]),
                                                   order[c["precision"]]))  # fmt: skip


@dataclass(frozen=True)
class Rivals:
    """What a sweep is compared with: baselines of one task in float32, in the order of BASELINES.

    ``borrowed``: those that the sweep's suite lacks; the suite of one epoch has them for the same architecture.
    ``same``: PyG's fastest in the precision of the sweep; None if no compiled PyG was measured in it.
    """

    plain: list[Cell | None]
    borrowed: list[Cell]
    same: Cell | None

    @classmethod
    def of(cls, results: Results, alone: Results, cell: Cell) -> Rivals:
        """The rivals of Weft's ``cell``."""
        here = {"shape": cell["shape"], "model": cell["model"]}
        own = [results.find(**here, side=side, precision="fp32") for side in BASELINES]
        other = [None if one else alone.find(**here, side=side) for side, one in zip(BASELINES, own, strict=True)]
        plain = [mine or theirs for mine, theirs in zip(own, other, strict=True)]
        pyg = plain
        if cell["precision"] != "fp32":
            pyg = [results.find(**here, side=side, precision=cell["precision"]) for side in BASELINES]
        pyg = [one for one in pyg if one and one["side"] in PYG_SIDES]
        compiled = any(one["side"] in COMPILED_SIDES for one in pyg)
        return cls(plain, [one for one in other if one], best_of(pyg) if compiled else None)

    def mark(self, legend: Legend, results: Results, alone: Results, weft: Cell) -> str:
        """The letters of the runs that a row is from."""
        own = [weft, *(one for one in (*self.plain, self.same) if one not in self.borrowed)]
        return " + ".join(filter(None, [legend.mark(results, own), legend.mark(alone, self.borrowed)]))


def sweep() -> str:
    """Per task and epoch, and the ratios."""
    alone, results, legend = Results.of("epoch"), Results.of("sweep"), Legend()
    rows = []
    for cell in _sweeps(results):
        rivals = Rivals.of(results, alone, cell)
        ratios = [times(over(one, cell)) for one in (*rivals.plain, rivals.same)]
        rows.append([cell["shape"], MODELS[cell["model"]], cell["tasks"], cell["precision"], ms(cell), *ratios,
                     rivals.mark(legend, results, alone, cell)])  # fmt: skip
    header = ["shape", "model", "T", "precision", "Weft, ms per task", *(f"over {NAMES[side]}" for side in BASELINES),
              "over PyG's best in the same precision", "run"]  # fmt: skip
    return f"{table(header, rows, OPTIONAL)}\n\n{legend.text()}"


def sweep_sizes() -> str:
    """The same by the number of tasks, where one run has several."""
    results, legend = Results.of("sweep"), Legend()
    found: dict[tuple[str, str, str, int], list[Cell]] = {}
    for cell in results.cells:
        if cell["side"] == "weft" and cell["status"] == "ok":
            found.setdefault((cell["shape"], cell["model"], cell["precision"], cell["run"]), []).append(cell)
    rows = []
    for (shape, model, precision, _), cells in found.items():
        if len(cells) > 1:
            by_size = sorted(cells, key=lambda cell: cell["tasks"])
            sizes = ", ".join(f"{cell['tasks']}: {number(cell['ms'])}" for cell in by_size)
            rows.append([shape, MODELS[model], precision, sizes, legend.mark(results, cells)])
    return f"{table(['shape', 'model', 'precision', 'T: ms per task', 'run'], rows)}\n\n{legend.text()}"


# ---- README ------------------------------------------------------------------------------------------


HEADLINE = [("gcn", 1, "fp32"), ("gcn", 32, "fp32"), ("gcn", 32, "tf32"), ("gcn", 32, "bf16"), ("sage", 1, "fp32"),
            ("sage", 16, "bf16"), ("gin", 1, "fp32"), ("gin", 16, "bf16"), ("gat", 1, "fp32"),
            ("gat", 16, "bf16")]  # fmt: skip


HEADLINE_SIDES = ("pyg", "compiled", "captured", "cusparse", "cusparse-captured")


def headline() -> str:
    """The arxiv shape: an epoch alone, and sweeps."""
    alone, together, legend = Results.of("epoch"), Results.of("sweep"), Legend()
    rows = []
    for model, tasks, precision in HEADLINE:
        here = {"shape": "arxiv", "model": model}
        if tasks == 1:
            weft = alone.find(**here, side="weft")
            plain = [alone.find(**here, side=side) for side in BASELINES]
            same = best_of(cell for cell in plain if cell and cell["side"] in PYG_SIDES)
            runs = legend.mark(alone, [weft, *plain])
        else:
            weft = together.find(**here, side="weft", precision=precision, tasks=tasks)
            rivals = Rivals.of(together, alone, weft)
            plain, same, runs = rivals.plain, rivals.same, rivals.mark(legend, together, alone, weft)
        shown = [one for side, one in zip(BASELINES, plain, strict=True) if side in HEADLINE_SIDES]
        ratios = [times(over(one, weft)) for one in (*shown, same)]
        rows.append([MODELS[model], tasks, precision, ms(weft), *ratios, runs])
    header = ["", "T", "precision", "Weft, ms", *(f"over {NAMES[side]}" for side in HEADLINE_SIDES),
              "over PyG's best in the same precision", "run"]  # fmt: skip
    return f"{table(header, rows, OPTIONAL)}\n\n{legend.text()}"


def _against(results: Results, weft: Cell, here: dict[str, str]) -> list[str]:
    """Every measured baseline as a multiple of Weft's time."""
    found = {side: results.find(**here, side=side) for side in BASELINES}
    return [f"{NAMES[side]} takes {times(over(cell, weft))} that" for side, cell in found.items() if cell]


def products_sentence() -> str:
    """One epoch of GCN on the products shape."""
    results = Results.of("epoch")
    here = {"shape": "products", "model": "gcn"}
    weft = results.find(**here, side="weft")
    against = _against(results, weft, here)
    return (
        f"Products shape (2.4 million nodes, 124 million edges): an epoch of a GCN takes {ms_in_words(weft)}; "
        f"{', '.join(against)}."
    )


def cora_sentence() -> str:
    """The sweep on a small graph, with what runs of PyG differed by."""
    results = Results.of("sweep")
    here = {"shape": "cora", "model": "gcn", "precision": "fp32"}
    mine = [cell for cell in results.cells if cell["side"] == "weft" and here.items() <= cell.items()]
    weft = max(mine, key=lambda cell: cell["tasks"])
    pyg = results.find(**here, side="pyg")
    runs = sorted([pyg["ms"], *pyg.get("earlier_ms", [])])
    rivals = zip(BASELINES, Rivals.of(results, Results.of("epoch"), weft).plain, strict=True)
    against = [f"{NAMES[side]} takes {times(over(cell, weft))} that" for side, cell in rivals if cell]
    return (
        f"Cora shape, {weft['tasks']} GCNs at once: {number(weft['ms'])} ms per task and epoch; for one task "
        f"{', '.join(against)}. On graphs this small PyG eager measures the host's speed: it took {number(runs[0])} to "
        f"{number(runs[-1])} ms in {len(runs)} runs ({ms_in_words(pyg)} in the newest), and the fastest of them is "
        f"{times(runs[0] / weft['ms'])}."
    )


def own_module_sentence() -> str:
    """PyG's GCN handed to Weft."""
    results = kept("compiled")
    plain, fast = (results.find(case="pyg-gcn", side=side) for side in ("plain", "compiled"))
    return (
        f"PyG's own GCN, handed to Weft as it is, takes {number(fast['ms'])} ms on the arxiv shape once compiled, "
        f"{number(plain['ms'])} before."
    )


def headline_text() -> str:
    """What else the README says."""
    from benchmarks.report import kernels, planning, runs

    return bullets(
        [products_sentence(), cora_sentence(), own_module_sentence(), kernels.spmm_sentence(),
         planning.memory_sentence(), runs.cpu_sentence(), planning.accuracy_sentence()]
    )  # fmt: skip


def arxiv_stack_sentence() -> str:
    """What stacking is worth on the arxiv shape."""
    alone, together = Results.of("epoch"), Results.of("sweep")
    one = alone.find(shape="arxiv", model="gcn", side="weft")
    many = together.find(shape="arxiv", model="gcn", side="weft", precision="fp32", tasks=32)
    return paragraph(
        f"On the arxiv shape 32 stacked GCNs take {number(many['ms'])} ms per task against {number(one['ms'])} for one "
        f"alone: most of the step is SpMM, which runs at the L2's bandwidth whatever T is."
    )
