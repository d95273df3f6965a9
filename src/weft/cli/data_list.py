"""``weft data ls``: a table of what can be loaded by name, folded to the terminal, without a library for tables."""

from __future__ import annotations

import json as jsonlib
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from weft.cli.format import GAP, aligned, column_widths, terminal_width
from weft.graph.catalog.listing import entries

HEADINGS = ("name", "kind", "nodes", "edges", "features", "classes", "note")
COUNTS = range(2, 6)  # columns with numbers, set to the right
NARROW = " "  # between columns, on a terminal with no room for notes
LEAST_NOTE, BELOW = 20, "    "  # columns for a note next to its row; else it stands below


def print_graphs(json: bool = False) -> None:
    """Print the table, or a JSON line per graph."""
    graphs = entries()
    if json:
        for entry in graphs:
            print(jsonlib.dumps(asdict(entry)))
        return
    rows = [HEADINGS]
    for entry in graphs:
        counts = (entry.num_nodes, entry.num_edges, entry.num_features, entry.num_classes)
        numbers = ("" if value is None else f"{value:,}" for value in counts)
        rows.append((entry.name, entry.kind, *numbers, entry.note))
    head, *lines = _lines(rows)
    dims = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(f"\x1b[2m{head}\x1b[0m" if dims else head)
    for line in lines:
        print(line)


def _lines(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows as lines; notes fold, next to their row or below it; names and numbers are never cut."""
    cells, width = [row[:-1] for row in rows], terminal_width() or sys.maxsize
    widths = column_widths(cells)
    indent = sum(widths) + len(GAP) * len(widths)
    below = width - indent < LEAST_NOTE
    lines: list[str] = []
    for line, (*_, note) in zip(aligned(cells, COUNTS, NARROW if below else GAP), rows, strict=True):
        if below:
            folded = textwrap.wrap(note, width, initial_indent=BELOW, subsequent_indent=BELOW) if lines else []
            lines += [line, *folded]
        else:
            first, *more = textwrap.wrap(note, width - indent) or [""]
            lines += [(line.ljust(indent) + first).rstrip(), *(" " * indent + part for part in more)]
    return lines
