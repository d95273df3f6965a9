"""Starts that took much longer than those of the same task in the other runs of its queue, and where the seconds went.

    python -m benchmarks.queue_runs.slow_starts queues.json       a second, on any machine

A start is all of a task's seconds on its worker but its epochs. The parts are those of ``start_parts``; files from
before they were recorded have none, and then the starts alone are listed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.recorder import print_table
from benchmarks.queue_runs.queue_simulations import starts_beside
from benchmarks.queue_runs.start_parts import PARTS
from weft.sched.policies import POLICIES

Cell = Mapping[str, Any]
TIMES_LONGER, SECONDS_LONGER = 2.0, 0.3  # than elsewhere: both, for a start to be slow


@dataclass(frozen=True)
class SlowStart:
    """A start, the median of the same task's in other modes, and its parts by name where they are known."""

    queue: str
    mode: str
    task: str
    seconds: float
    elsewhere: float
    parts: Mapping[str, float]
    tried_again: bool

    def row(self, parts: Sequence[str]) -> list[Any]:
        """Its line of the table, with some of the parts."""
        name = f"{self.task} (tried again)" if self.tried_again else self.task
        return [self.queue, self.mode, name, self.seconds, self.elsewhere, *(self.parts.get(part) for part in parts)]


def slow_starts(cells: Sequence[Cell]) -> Iterator[SlowStart]:
    """The slow starts of all queues, by queue and mode."""
    for queue in dict.fromkeys(cell["queue"] for cell in cells):
        found = {cell["mode"]: dict(cell) for cell in cells if cell["queue"] == queue and cell["status"] == "ok"}
        for mode in (mode for mode in found if mode in POLICIES):
            yield from _slow(found[mode], starts_beside(mode, found))


def _slow(cell: Cell, elsewhere: Mapping[str, float]) -> Iterator[SlowStart]:
    for task, took in cell["took"].items():
        seconds, usual = took["seconds"] - took["trained_seconds"], elsewhere.get(task)
        if usual is not None and seconds > TIMES_LONGER * usual and seconds - usual >= SECONDS_LONGER:
            parts = {part: took[part] for part in PARTS if part in took}
            again = task in cell.get("tried_again", ())
            yield SlowStart(cell["queue"], cell["mode"], task, seconds, usual, parts, again)


def main() -> None:
    """Print the slow starts of a results file."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.queue_runs.slow_starts queues.json")
    rows = list(slow_starts(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"]))
    known = [part for part in PARTS if any(part in one.parts for one in rows)]
    columns = [f"{part.removesuffix('_seconds')} s" for part in known]
    print_table(["queue", "mode", "task", "start s", "elsewhere s", *columns], [one.row(known) for one in rows])


if __name__ == "__main__":
    main()
