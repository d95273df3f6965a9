"""Figures of training and of kernels: one epoch, sweeps, SpMM, sampling, and the short table of the README."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.results import Cell, Results
from benchmarks.report.markdown import (
    MODELS,
    Legend,
    best_of,
    bullets,
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
    "compiled": "PyG compiled",
    "captured": "PyG compiled, step captured",
    "cusparse": "cuSPARSE eager",
    "cusparse-captured": "cuSPARSE, step captured",
}
ALONE = "Weft, `A X` in every step"
# Columns that a table does without until somebody has measured them.
OPTIONAL = (ALONE, *(f"{before}{NAMES['compiled']}" for before in ("", "over ")))
SHAPES = ("cora", "pubmed", "arxiv", "products")


def _shapes(results: Results, first: Sequence[str]) -> list[str]:
    """The shapes of the cells: those of the documents in their order, then others."""
    return sorted(dict.fromkeys(cell["shape"] for cell in results.cells), key=lambda s: (*first, s).index(s))


def _epochs(results: Results) -> Iterator[Row]:
    for shape in _shapes(results, SHAPES):
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


def epoch(results: Results) -> str:
    """Milliseconds of every side."""
    legend, rows = Legend(), []
    for row in _epochs(results):
        others = row.sides(("weft-every-step", *BASELINES))
        about = [row.weft["shape"], MODELS[row.weft["model"]], ms(row.weft), *map(ms, others)]
        rows.append([*about, legend.mark(results, [row.weft])])
    header = ["shape", "model", "Weft", ALONE, *(NAMES[side] for side in BASELINES), "run"]
    return f"{table(header, rows, OPTIONAL)}\n\n{legend.text()}"


def _sweeps(results: Results) -> list[Cell]:
    """Weft's largest sweep of each shape, model and precision."""
    largest: dict[tuple[str, str, str], Cell] = {}
    for cell in results.cells:
        key = (cell["shape"], cell["model"], cell["precision"])
        if cell["side"] == "weft" and cell["status"] == "ok" and cell["tasks"] > 1:
            largest[key] = max(cell, largest.get(key, cell), key=lambda one: one["tasks"])
    shapes, order = _shapes(results, SHAPES), {"fp32": 0, "tf32": 1, "bf16": 2}
    return sorted(largest.values(), key=lambda c: (shapes.index(c["shape"]), list(MODELS).index(c["model"]),
                                                   order[c["precision"]]))  # fmt: skip


def sweep(results: Results) -> str:
    """Per task and epoch, and the ratios."""
    legend, rows = Legend(), []
    for cell in _sweeps(results):
        row = Row(results, cell)
        ratios = row.ratios([*row.sides(precision="fp32"), row.best_pyg(cell["precision"])])
        about = [cell["shape"], MODELS[cell["model"]], cell["tasks"], cell["precision"], ms(cell)]
        rows.append([*about, *ratios, legend.mark(results, [cell])])
    header = ["shape", "model", "T", "precision", "Weft, ms per task", *(f"over {NAMES[side]}" for side in BASELINES),
              "over PyG's best in the same precision", "run"]  # fmt: skip
    return f"{table(header, rows, OPTIONAL)}\n\n{legend.text()}"


HEADLINE = [("gcn", 1, "fp32"), ("gcn", 32, "fp32"), ("gcn", 32, "tf32"), ("gcn", 32, "bf16"), ("sage", 1, "fp32"),
            ("sage", 16, "bf16"), ("gin", 1, "fp32"), ("gin", 16, "bf16"), ("gat", 1, "fp32"),
            ("gat", 16, "bf16")]  # fmt: skip


HEADLINE_SIDES = ("pyg", "captured", "cusparse", "cusparse-captured")


def _headline(rows_of: Sequence[tuple[str, int, str]], sides: Sequence[str]) -> tuple[list[list[Any]], Legend]:
    """Rows of the arxiv shape with Weft's time and how many times as long ``sides`` take."""
    suites, legend = (Results.of("epoch"), Results.of("sweep")), Legend()
    rows = []
    for model, tasks, precision in rows_of:
        results, here = suites[tasks > 1], {"shape": "arxiv", "model": model, "side": "weft"}
        kind = {"tasks": tasks, "precision": precision} if tasks > 1 else {}
        row = Row(results, results.find(**here, **kind))
        plain, own = ("fp32", precision) if tasks > 1 else (None, None)
        ratios = row.ratios([*row.sides(sides, plain), row.best_pyg(own)])
        rows.append([MODELS[model], tasks, precision, ms(row.weft), *ratios, legend.mark(results, [row.weft])])
    return rows, legend


def headline() -> str:
    """The arxiv shape: an epoch alone, and sweeps."""
    rows, legend = _headline(HEADLINE, HEADLINE_SIDES)
    header = ["", "T", "precision", "Weft, ms", *(f"over {NAMES[side]}" for side in HEADLINE_SIDES),
              "over PyG's best in the same precision", "run"]  # fmt: skip
    return f"{table(header, rows, OPTIONAL)}\n\n{legend.text()}"


def brief() -> str:
    """One training per model on the arxiv shape against the fastest of PyG's sides and cuSPARSE's, for the README."""
    rows, legend = _headline([row for row in HEADLINE if row[1] == 1], ["cusparse-captured"])
    header = ["one epoch", "Weft, ms", "a CSR adjacency through cuSPARSE, step captured", "PyG's best"]
    return f"{table(header, [[row[0], *row[3:6]] for row in rows])}\n\n{legend.text()}"


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


def headline_text() -> str:
    """What else the README says."""
    from benchmarks.report import runs

    sentences = [products_sentence, cora_sentence, spmm_sentence]
    sentences += [runs.memory_sentence, runs.cpu_sentence, runs.accuracy_sentence]
    return bullets([sentence() for sentence in sentences])


SPMM_SHAPES = ("pubmed", "arxiv", "products", "reddit")


def _spmm_rows(results: Results) -> list[dict[str, Any]]:
    """Per shape and width: cuSPARSE's cell, Weft's by the order that a plan would take, and by length."""
    widths = sorted({cell["features"] for cell in results.cells})
    rows = []
    for shape, width in ((shape, width) for shape in _shapes(results, SPMM_SHAPES) for width in widths):
        here = {"shape": shape, "features": width}
        orders = [results.find(**here, side="scales", rows=order) for order in ("cluster", "length")]
        measured = [cell for cell in orders if cell]
        base = results.find(**here, side="cusparse")
        if base and measured:
            planned = next((cell for cell in measured if cell.get("planned")), measured[-1])
            rows.append({**here, "base": base, "weft": planned, "length": orders[1]})
    return rows


def spmm(results: Results) -> str:
    """Against cuSPARSE."""
    legend, rows = Legend(), []
    for row in _spmm_rows(results):
        base, weft = row["base"], row["weft"]
        other = "" if row["length"] is weft or row["length"] is None else f", by length {number(row['length']['ms'])}"
        rows.append([row["shape"], row["features"], ms(base), ms(weft) + other, times(over(base, weft)),
                     number(weft["gathered_tb_s"], 2), legend.mark(results, [base, weft])])  # fmt: skip
    ratios = [over(row["base"], row["weft"]) for row in _spmm_rows(results)]
    mean = f"Geometric mean {times(geometric_mean(ratios))}, worst {times(min(ratios))}." if ratios else ""
    header = ["shape", "F", "cuSPARSE", "Weft", "ratio", "TB/s", "run"]
    return f"{table(header, rows)}\n\n{mean}\n\n{legend.text()}"


def spmm_sentence() -> str:
    """The range."""
    ratios = [over(row["base"], row["weft"]) for row in _spmm_rows(Results.of("spmm"))]
    return (
        f"For SpMM alone cuSPARSE's best algorithm takes {number(min(ratios))} to {number(max(ratios))} times as long "
        f"as Weft (geometric mean {number(geometric_mean(ratios))}, {len(ratios)} cells)."
    )


def multi_kernels(results: Results) -> str:
    """One SpMM of T tasks."""
    legend, rows = Legend(), []
    for tasks in sorted({cell["tasks"] for cell in results.cells if cell["part"] == "widths"}):
        here = {"part": "widths", "tasks": tasks}
        cluster, length = (results.find(**here, side="batched", rows=order) for order in ("cluster", "length"))
        wide, separate = (results.find(**here, side=side) for side in ("wide", "separate"))
        weft = cluster or length
        if weft is None:
            continue
        rows.append([tasks, ms(cluster), ms(length), ms(wide), ms(separate), times(over(wide, weft)),
                     times(over(separate, weft)), number(weft["ms_a_task"]), number(weft["gathered_tb_s"], 2),
                     legend.mark(results, [cluster, length, wide, separate])])  # fmt: skip
    header = ["T", "Weft, rows by cluster", "rows by length", "one wide cuSPARSE", "T of cuSPARSE", "over wide",
              "over separate", "ms per task", "TB/s", "run"]  # fmt: skip
    return f"{table(header, rows)}\n\n{legend.text()}"


# The samplers of one hop: as a column is headed, as a cell is named.
SAMPLERS = {
    "default": "default",
    "reservoir": "reservoir",
    "as DGL": "reservoir, DGL's layout",
    "none": "paper: none",
    "B": "paper: B",
    "S": "paper: S",
    "B+S": "paper: B+S",
    "paper (B+A)": "paper",
    "classes": "paper: classes",
    "classes, S": "paper: classes, S",
    "picks alone": "picks alone",
}


PAPER_SAYS = (
    "The paper (P100) reports over DGL's kernel, for 200,000 seeds of products at fan-outs 10, 15, 30: 1.28x, 1.30x, "
    "1.35x; for 100,000 seeds of reddit at fan-out 30: B 1.20x, B+S 1.22x, B+A 1.31x."
)


def samplers(results: Results) -> str:
    """One hop by every sampler, in milliseconds, and what each optimisation of the paper gains over its baseline."""
    legend, rows, largest = Legend(), [], dict[str, dict[int, dict[str, Cell | None]]]()
    hops = [cell for cell in results.cells if cell["work"] == "one hop" and cell.get("ms")]
    for shape, fanout, seeds in sorted({(cell["shape"], cell["fanout"], cell["seeds"]) for cell in hops}):
        here = {"work": "one hop", "shape": shape, "fanout": fanout, "seeds": seeds}
        cells = {head: results.find(**here, side=side) for head, side in SAMPLERS.items()}
        largest.setdefault(shape, {})[fanout] = cells
        figures = [number(None if cell is None else cell["ms"]) for cell in cells.values()]
        rows.append([shape, fanout, f"{seeds:,}", *figures, times(over(cells["none"], cells["paper (B+A)"])),
                     times(over(cells["reservoir"], cells["paper (B+A)"])),
                     legend.mark(results, cells.values())])  # fmt: skip
    header = ["shape", "fan-out", "seeds", *SAMPLERS, "none / paper", "reservoir / paper", "run"]
    told = [PAPER_SAYS] if rows else []
    for shape, by_fanout in largest.items():
        gains = (
            f"{head} {', '.join(times(over(cells['none'], cells[head])) for cells in by_fanout.values())}"
            for head in ("B", "S", "B+S", "paper (B+A)", "classes", "classes, S", "reservoir", "default")
        )
        fanouts = ", ".join(map(str, by_fanout))
        told.append(
            f"The time of *none* over others, {shape} shape, most seeds, fan-outs {fanouts}: {'; '.join(gains)}."
        )
    return "\n\n".join([table(header, rows), *map(paragraph, told), legend.text()])


def sampling(results: Results) -> str:
    """Hops with compaction, and gathering."""
    legend, rows = Legend(), []
    for cell in (cell for cell in results.cells if cell["work"] != "one hop"):
        size = f"{cell.get('seeds') or cell.get('rows'):,}"
        rate = _rate(cell)
        launched = number(cell.get("launched_ms"))
        rows.append([cell["work"], cell["side"], size, cell.get("fanout", ""), ms(cell), launched, rate,
                     legend.mark(results, [cell])])  # fmt: skip
    reasons = dict.fromkeys(f"{c['side']}: {c['reason']}." for c in results.cells if c.get("reason"))
    header = ["work", "side", "seeds or rows", "fan-out", "ms", "ms launched", "rate", "run"]
    return "\n\n".join([table(header, rows), *map(paragraph, reasons), legend.text()])


def _rate(cell: Cell) -> str:
    if cell.get("gb_s"):
        return f"{number(cell['gb_s'])} GB/s"
    return f"{number(cell['mega_edges_s'])} M edges/s" if cell.get("mega_edges_s") else ""
