"""Figures of training: one epoch, sweeps, and the short table of the README."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
RARE = ("adj_t", "compiled", "compiled-graphs")
OPTIONAL = (ALONE, *(f"{before}{NAMES[side]}" for side in RARE for before in ("", "over ")))
SHAPES = ("cora", "pubmed", "arxiv", "products")
VARIES = 1.1  # baselines whose runs differ by more are listed


def _epochs(results: Results) -> Iterator[Row]:
    for shape in SHAPES:
        for model in ("gcn", "sage", "gin", "gat"):
            weft = results.find(shape=shape, model=model, side="weft")
            if weft is not None:
                yield Row(results, weft)


@dataclass(frozen=True)
class Row:
    """One row of a table: Weft's cell, and baselines of the same run and architecture, of one task each."""

    results: Results
    weft: Cell

    def side(self, name: str, precision: str | None = None) -> Cell | None:
        """What became of a baseline in that run; None if it was not part of it."""
        here = {"shape": self.weft["shape"], "model": self.weft["model"], "run": self.weft["run"], "side": name}
        return self.results.any(**here, **({} if precision is None else {"precision": precision}))

    def sides(self, names: Sequence[str] = BASELINES, precision: str | None = None) -> list[Cell | None]:
        """Several of them, in the order of ``names``."""
        return [self.side(name, precision) for name in names]

    def best_pyg(self, precision: str | None = None) -> Cell | None:
        """PyG's fastest; None if none of them was compiled."""
        found = [cell for cell in self.sides(PYG_SIDES, precision) if cell is not None and cell.get("ms")]
        return best_of(found) if any(cell["side"] in COMPILED_SIDES for cell in found) else None

    def ratios(self, cells: Iterable[Cell | None]) -> list[str]:
        """Each over Weft."""
        return [times(over(cell, self.weft)) for cell in cells]


def epoch() -> str:
    """Milliseconds of every side."""
    results, legend = Results.of("epoch"), Legend()
    rows = []
    for row in _epochs(results):
        others = row.sides(("weft-every-step", *BASELINES))
        about = [row.weft["shape"], MODELS[row.weft["model"]], ms(row.weft), *map(ms, others)]
        rows.append([*about, legend.mark(results, [row.weft])])
    header = ["shape", "model", "Weft", ALONE, *(NAMES[side] for side in BASELINES), "run"]
    return f"{table(header, rows, OPTIONAL)}\n\n{legend.text()}"


def epoch_ratios() -> str:
    """Every baseline's time over Weft's."""
    rows = []
    for row in _epochs(Results.of("epoch")):
        found = row.sides()
        best = best_of(found)
        named = f"{times(over(best, row.weft))} ({NAMES[best['side']]})" if best else MISSING
        rows.append([row.weft["shape"], MODELS[row.weft["model"]], *row.ratios(found), named])
    return table(["shape", "model", *(NAMES[side] for side in BASELINES), "best baseline"], rows, OPTIONAL)


def epoch_memory() -> str:
    """Peak GB of an epoch; what a replayed model holds does not show in the allocator's mark."""
    sides = [side for side in BASELINES if side != "compiled-graphs"]
    rows = []
    for row in _epochs(Results.of("epoch")):
        if row.weft["shape"] in ("arxiv", "products"):
            cells = [row.weft, *(cell or {} for cell in row.sides(sides))]
            about = [row.weft["shape"], MODELS[row.weft["model"]]]
            rows.append([*about, *(number(cell.get("peak_gb")) for cell in cells)])
    return table(["shape", "model", "Weft", *(NAMES[side] for side in sides)], rows, OPTIONAL)


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


def sweep() -> str:
    """Per task and epoch, and the ratios."""
    results, legend = Results.of("sweep"), Legend()
    rows = []
    for cell in _sweeps(results):
        row = Row(results, cell)
        ratios = row.ratios([*row.sides(precision="fp32"), row.best_pyg(cell["precision"])])
        about = [cell["shape"], MODELS[cell["model"]], cell["tasks"], cell["precision"], ms(cell)]
        rows.append([*about, *ratios, legend.mark(results, [cell])])
    header = ["shape", "model", "T", "precision", "Weft, ms per task", *(f"over {NAMES[side]}" for side in BASELINES),
              "over PyG's best in the same precision", "run"]  # fmt: skip
    return f"{table(header, rows, OPTIONAL)}\n\n{legend.text()}"


def _captured_pyg() -> dict[str, dict[str, Cell]]:
    """PyG compiled, its step captured, on the arxiv shape: by model and precision, of the newest run that has it."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in Results.of("sweep").cells:
        if cell["shape"] == "arxiv" and cell["side"] == "captured" and cell["status"] == "ok":
            found.setdefault(cell["model"], {})[cell["precision"]] = cell
    newest = max((cell["run"] for cells in found.values() for cell in cells.values()), default=0)
    return {model: {p: c for p, c in cells.items() if c["run"] == newest} for model, cells in found.items()}


def pyg_precisions() -> str:
    """What half precision does to PyG."""
    results, legend, rows = Results.of("sweep"), Legend(), []
    for model, cells in sorted(_captured_pyg().items(), key=lambda pair: list(MODELS).index(pair[0])):
        of_model = [cells.get(precision) for precision in ("fp32", "tf32", "bf16")]
        rows.append([MODELS[model], *map(ms, of_model), legend.mark(results, of_model)])
    return f"{table(['model', 'fp32', 'tf32', 'bf16, under autocast', 'run'], rows)}\n\n{legend.text()}"


def pyg_precisions_sentence() -> str:
    """The same of GCN, in words."""
    cells = _captured_pyg()["gcn"]
    return (
        f"In a run of its own, without Weft, PyG's GCN on the arxiv shape, compiled with its step captured, takes "
        f"{ms_in_words(cells['fp32'])} in fp32, {ms_in_words(cells['tf32'])} in tf32 and {ms_in_words(cells['bf16'])} "
        f"under autocast to bf16."
    )


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


HEADLINE_SIDES = ("pyg", "captured", "cusparse", "cusparse-captured")


def headline() -> str:
    """The arxiv shape: an epoch alone, and sweeps."""
    suites, legend = (Results.of("epoch"), Results.of("sweep")), Legend()
    rows = []
    for model, tasks, precision in HEADLINE:
        results, here = suites[tasks > 1], {"shape": "arxiv", "model": model, "side": "weft"}
        kind = {"tasks": tasks, "precision": precision} if tasks > 1 else {}
        row = Row(results, results.find(**here, **kind))
        plain, own = ("fp32", precision) if tasks > 1 else (None, None)
        ratios = row.ratios([*row.sides(HEADLINE_SIDES, plain), row.best_pyg(own)])
        rows.append([MODELS[model], tasks, precision, ms(row.weft), *ratios, legend.mark(results, [row.weft])])
    header = ["", "T", "precision", "Weft, ms", *(f"over {NAMES[side]}" for side in HEADLINE_SIDES),
              "over PyG's best in the same precision", "run"]  # fmt: skip
    return f"{table(header, rows, OPTIONAL)}\n\n{legend.text()}"


def _against(row: Row, precision: str | None = None) -> str:
    """Every baseline of the run as a multiple of Weft's time."""
    found = [cell for cell in row.sides(precision=precision) if cell and cell.get("ms")]
    return ", ".join(f"{NAMES[cell['side']]} {number(over(cell, row.weft))} times as long" for cell in found)


def _alone(shape: str) -> Row:
    """One epoch of a GCN."""
    results = Results.of("epoch")
    return Row(results, results.find(shape=shape, model="gcn", side="weft"))


def products_sentence() -> str:
    """One epoch of GCN on the products shape."""
    row = _alone("products")
    return (
        f"Products shape (2.4 million nodes, 124 million edges): an epoch of a GCN takes {ms_in_words(row.weft)}, "
        f"{_against(row)}."
    )


def cora_sentence() -> str:
    """One GCN and a sweep on a small graph, with what runs of PyG differed by."""
    results, one = Results.of("sweep"), _alone("cora")
    mine = [cell for cell in _sweeps(results) if (cell["shape"], cell["model"]) == ("cora", "gcn")]
    many = Row(results, max(mine, key=lambda cell: cell["tasks"]))
    pyg = many.side("pyg", "fp32")
    runs = sorted([pyg["ms"], *pyg.get("earlier_ms", [])])
    return (
        f"Cora shape: an epoch of a GCN takes {ms_in_words(one.weft)}, {_against(one)}. {many.weft['tasks']} GCNs at "
        f"once take {number(many.weft['ms'])} ms per task; in that run {_against(many, 'fp32')}. On graphs this small "
        f"PyG eager measures the host's speed: it took {number(runs[0])} to {number(runs[-1])} ms in {len(runs)} runs "
        f"({ms_in_words(pyg)} in the newest)."
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

    sentences = [pyg_precisions_sentence, products_sentence, cora_sentence, own_module_sentence, kernels.spmm_sentence]
    sentences += [planning.memory_sentence, runs.cpu_sentence, planning.accuracy_sentence]
    return bullets([sentence() for sentence in sentences])


def arxiv_stack_sentence() -> str:
    """What stacking is worth on the arxiv shape."""
    alone, together = Results.of("epoch"), Results.of("sweep")
    one = alone.find(shape="arxiv", model="gcn", side="weft")
    many = together.find(shape="arxiv", model="gcn", side="weft", precision="fp32", tasks=32)
    return paragraph(
        f"On the arxiv shape 32 stacked GCNs take {number(many['ms'])} ms per task against {number(one['ms'])} for one "
        f"alone in another run: most of the step is SpMM, which runs at the L2's bandwidth whatever T is."
    )
