"""``weft data ls``: a table of what can be loaded by name, folded to the terminal, without a library for tables."""

from __future__ import annotations

import json as jsonlib
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from weft.graph.catalog.listing import Entry, entries

HEADINGS = ("name", "kind", "nodes", "edges", "features", "classes", "note")
COUNTS = slice(2, 6)  # columns with numbers, set to the right
WIDE, NARROW = 2, 1  # spaces between columns
LEAST_NOTE, BELOW = 20, "    "  # columns for a note beside its row; else it stands below


def print_graphs(json: bool = False) -> None:
    """Print the table, or a JSON line per graph."""
    found = entries()
    if json:
        for entry in found:
            print(jsonlib.dumps(asdict(entry)))
        return
    head, *lines = _lines([HEADINGS, *map(_cells, found)])
    print(
        f"\x1b[2m{head}\x1b[0m"
        if (sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")
        else head
    )
    for line in lines:
        print(line)


def _cells(entry: Entry) -> tuple[str, ...]:
    counts = (entry.num_nodes, entry.num_edges, entry.num_features, entry.num_classes)
    return (entry.name, entry.kind, *("" if value is None else f"{value:,}" for value in counts), entry.note)


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines; notes fold, names and numbers are never cut."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS) - 1)]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    beside = room - sum(widths) - WIDE * len(widths)
    if beside < LEAST_NOTE:
        return [line for row in rows for line in _with_note_below(row, widths, room)]
    return [line for row in rows for line in _with_note_beside(row, widths, beside)]


def _with_note_beside(row: Sequence[str], widths: Sequence[int], room: int) -> list[str]:
    *cells, note = row
    first, *more = textwrap.wrap(note, room) or [""]
    indent = " " * (sum(widths) + WIDE * len(widths))
    return [(_aligned(cells, widths, WIDE) + first).rstrip(), *(indent + part for part in more)]


def _with_note_below(row: Sequence[str], widths: Sequence[int], room: int) -> list[str]:
    *cells, note = row
    below = textwrap.wrap(note, room, initial_indent=BELOW, subsequent_indent=BELOW) if row is not HEADINGS else []
    return [_aligned(cells, widths, NARROW).rstrip(), *below]


def _aligned(cells: Sequence[str], widths: Sequence[int], gap: int) -> str:
    numbers = range(*COUNTS.indices(len(HEADINGS)))
    put = (
        cell.rjust(width) if column in numbers else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "".join(cell + " " * gap for cell in put)
