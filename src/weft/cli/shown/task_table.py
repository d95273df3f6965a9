"""The tasks of a queue as a table: whole in a pipe, on a terminal as wide as it is, with an ellipsis where cut."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any

from weft.cli.terminal_text import plain_line
from weft.core.units import show_bytes, show_seconds

COLUMNS = ("id", "state", "name", "graph", "model", "user", "memory", "time", "score", "why")
GAP = "  "
LEAST = {"why": 24, "name": 16, "graph": 12, "model": 12, "user": 8}  # to which columns are cut, these first


def task_table(tasks: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """A line per task below the names of the columns, of at most ``width`` characters if that can be."""
    rows = [COLUMNS, *(_row(task) for task in tasks)]
    widths = _widths(rows, width)
    return "\n".join(GAP.join(map(_cell, row, widths)).rstrip() for row in rows)


def terminal_width() -> int | None:
    """How wide the terminal is; None where the output goes to something else."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _widths(rows: Sequence[tuple[str, ...]], most: int | None) -> list[int]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    if most is None:
        return widths
    over = sum(widths) + len(GAP) * (len(widths) - 1) - most
    for name, least in LEAST.items():
        place = COLUMNS.index(name)
        cut = max(min(over, widths[place] - least), 0)
        widths[place] -= cut
        over -= cut
    return widths


def _cell(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"


def _row(task: dict[str, Any]) -> tuple[str, ...]:
    memory = "" if task["bytes"] is None else show_bytes(task["bytes"])
    seconds = "" if task["seconds"] is None else show_seconds(task["seconds"])
    score = "" if task["score"] is None else f"{task['score']:.4f}"
    about = (task["task"].get("graph", ""), task["task"].get("model", "gcn"), task["user"], memory, seconds, score)
    why = task["why"] or (task["error"] if task["state"] in ("failed", "queued") else "") or ""
    return tuple(map(plain_line, (task["id"], task["state"], task["name"], *map(str, about), why)))
