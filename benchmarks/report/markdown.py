"""Markdown of figures: numbers, spreads, ratios, tables, and the runs that the rows of a table came from."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.results import Cell, Results

MISSING = "-"  # no cell
WIDTH = 120
MODELS = {"gcn": "GCN", "sage": "SAGE", "gin": "GIN", "gat": "GAT", "gatv2": "GATv2"}


def number(value: float | None, digits: int = 3) -> str:
    """``value`` to so many significant digits, with thousands separated."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    if "e" in text:
        return f"{value:.{digits + 4}f}".rstrip("0")
    have = sum(c.isdigit() for c in text.lstrip("-0."))
    return text + ("" if "." in text else ".") * (have < digits) + "0" * (digits - have)


def times(value: float | None) -> str:
    """A ratio: ``"4.34x"``."""
    return MISSING if value is None else f"{number(value)}x"


def percent(share: float | None, digits: int = 2) -> str:
    """``0.0123`` as ``"1.2 %"``."""
    return MISSING if share is None else f"{number(100 * share, digits)} %"


def spread(cell: Cell) -> str:
    """Half of the distance between the quartiles, as a share of the median; empty if the file does not have it."""
    timing = cell.get("timing")
    if not isinstance(timing, dict) or not timing.get("ms") or timing.get("repeats", 0) < 2:
        return ""
    half = 50 * (timing["high"] - timing["low"]) / timing["ms"]
    return f" ±{half:.1f} %" if half < 10 else f" ±{half:.0f} %"


def ms(cell: Cell | None, digits: int = 3) -> str:
    """The median of a cell with its spread, or what became of it."""
    if cell is None:
        return MISSING
    if cell.get("status", "ok") != "ok":
        return fate(cell)
    return number(cell["ms"], digits) + spread(cell)


def ms_in_words(cell: Cell) -> str:
    """``"36.6 ms ±0.1 %"``."""
    return f"{number(cell['ms'])} ms{spread(cell)}"


def fate(cell: Cell) -> str:
    """Why a cell has no figure, in two words."""
    if cell["status"] == "skipped":
        return "not run"
    return "out of memory" if str(cell.get("error", "")).startswith("out of memory") else "failed"


def over(baseline: Cell | None, weft: Cell | None) -> float | None:
    """A baseline's milliseconds over Weft's."""
    both = (baseline or {}).get("ms"), (weft or {}).get("ms")
    return both[0] / both[1] if all(both) else None


def best_of(cells: Iterable[Cell | None]) -> Cell | None:
    """The cell with the least milliseconds."""
    good = [cell for cell in cells if cell is not None and cell.get("ms")]
    return min(good, key=lambda cell: cell["ms"]) if good else None


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], optional: Iterable[str] = ()) -> str:
    """A Markdown table; ``optional`` columns are left out if no row has anything in them."""
    texts, optional = [[_text(value) for value in row] for row in rows], set(optional)
    filled = [any(row[i] not in (MISSING, "") for row in texts) for i in range(len(header))]
    kept = [i for i, name in enumerate(header) if name not in optional or filled[i]]
    lines = [[header[i] for i in kept], ["---"] * len(kept), *([row[i] for i in kept] for row in texts)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def print_rows(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print such a table."""
    print(table(header, rows), end="\n\n")


def _text(value: Any) -> str:
    return number(value) if value is None or isinstance(value, float) else str(value)


def paragraph(text: str) -> str:
    """Prose, wrapped."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def bullets(items: Iterable[str]) -> str:
    """A list."""
    wrap = {"width": WIDTH, "subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill("- " + " ".join(item.split()), **wrap) for item in items)


class Legend:
    """A letter per run that a table has cells from, and what these runs were."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int], dict[str, Any]] = {}

    def mark(self, results: Results, cells: Iterable[Cell | None]) -> str:
        """The letters of the runs that these cells are from: one, if a row is one run."""
        found = sorted({cell["run"] for cell in cells if cell is not None and cell.get("status", "ok") == "ok"})
        for run in found:
            self._runs.setdefault((results.benchmark, run), results.runs[run])
        order = list(self._runs)
        return " + ".join(string.ascii_lowercase[order.index((results.benchmark, run))] for run in found)

    def text(self) -> str:
        """``Runs: a: ...``"""
        items = [f"*{string.ascii_lowercase[place]}*: {said(suite, run)}" for place, ((suite, _), run) in
                 enumerate(self._runs.items())]  # fmt: skip
        return paragraph(f"Runs: {'; '.join(items)}.") if items else ""


def said(suite: str, run: dict[str, Any]) -> str:
    """One run in words: suite, date, device, versions, commit, and what is noted about it."""
    date = str(run.get("date", "no date"))[:16].replace("T", " ")
    commit = f", commit {run['commit']}" if run.get("commit") else ""
    threads = f", {run['threads']} threads" if run.get("threads") else ""
    note = f" ({run['note'].rstrip('.')})" if run.get("note") else ""
    return f"`{suite}` {date}, {run.get('device')}{threads}, torch {str(run.get('torch')).split('+')[0]}{commit}{note}"
