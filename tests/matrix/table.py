"""Try cells of the matrix, record their outcomes, and write the table of docs/architecture.md from the record.

python -m tests.matrix.table                      the table, from the record
python -m tests.matrix.table --try all            every cell anew, then both
python -m tests.matrix.table --try "Ray" "R-GCN"  cells whose names have one of these words in them
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tests.matrix.cells import CELLS, KINDS, MODES, PLACES, SAME, Cell, Fault, Matrix, recorded

RECORD = Path(__file__).with_name("outcomes.json")
DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"
MARKED = re.compile(r"<!-- matrix -->\n.*?<!-- end of the matrix -->", re.DOTALL)


def try_cells(cells: Iterable[Cell], keep: Callable[[str, str], None] = lambda *_: None) -> dict[str, str]:
    """The outcome of each, by cell, which ``keep`` is given too; that of a fault begins with ``FAULT``."""
    found = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Matrix(Path(folder)) as matrix:
        for cell in cells:
            begin = time.monotonic()
            try:
                found[str(cell)] = matrix.outcome(cell)
            except Fault as fault:
                found[str(cell)] = f"FAULT: {fault}"
            keep(str(cell), found[str(cell)])
            print(f"{time.monotonic() - begin:6.1f} s  {cell}: {found[str(cell)]}", flush=True)
    return found


def text_of(outcomes: Mapping[str, str]) -> str:
    """The table, and the sentences of refusals below it."""
    sentences = list(dict.fromkeys(
        outcomes[str(cell)] for cell in CELLS if outcomes.get(str(cell), SAME) != SAME
    ))  # fmt: skip

    def said(cell: Cell) -> str:
        outcome = outcomes.get(str(cell))
        if outcome is None:
            return "not tried"
        return "runs" if outcome == SAME else f"refused ({sentences.index(outcome) + 1})"

    def both(mode: str, kind: str, place: str) -> str:
        alive, killed = (said(Cell(mode, kind, place, killed)) for killed in (False, True))
        return alive if alive == killed else f"{alive}; killed: {killed}"

    lines = ["| work | " + " | ".join(PLACES) + " |", "|---|" + "---|" * len(PLACES)]
    for mode in MODES:
        for kind in KINDS:
            row = " | ".join(both(mode, kind, place) for place in PLACES)
            lines.append(f"| {kind}, {mode} | {row} |")
    tried = [outcomes[str(cell)] for cell in CELLS if str(cell) in outcomes]
    refusals = " Refusals, as users see them:" if sentences else ""
    lines += ["", f"{sum(one == SAME for one in tried)} of {len(CELLS)} cells run.{refusals}", ""]
    lines += [f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)]
    return "\n".join(lines).strip()


def keep(cell: str, outcome: str) -> None:
    """Put an outcome on record; a cell with a fault has none."""
    found = recorded(RECORD) if RECORD.exists() else {}
    found.pop(cell, None)
    found |= {} if outcome.startswith("FAULT") else {cell: outcome}
    ordered = {str(one): found[str(one)] for one in CELLS if str(one) in found}
    RECORD.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def written(document: str, outcomes: Mapping[str, str]) -> str:
    """``document`` with the table between its markers."""
    if not MARKED.search(document):
        raise SystemExit("docs/architecture.md has no '<!-- matrix -->' with an '<!-- end of the matrix -->' behind it")
    return MARKED.sub(lambda _: f"<!-- matrix -->\n\n{text_of(outcomes)}\n\n<!-- end of the matrix -->", document)


def main() -> None:
    """Try what was chosen, and write."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--try", nargs="*", default=[], dest="words", help="all, missing, or words of the cells to try")
    words = parser.parse_args().words
    known = recorded(RECORD) if RECORD.exists() else {}
    chosen = [
        cell
        for cell in CELLS
        if "all" in words or ("missing" in words and str(cell) not in known) or any(word in str(cell) for word in words)
    ]
    faults = {cell: one for cell, one in try_cells(chosen, keep).items() if one.startswith("FAULT")}
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8"), recorded(RECORD)), encoding="utf-8")
    if faults:
        sys.exit("\n".join(f"{cell}: {outcome}" for cell, outcome in faults.items()))


if __name__ == "__main__":
    main()
