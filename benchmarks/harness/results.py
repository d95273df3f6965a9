"""Results: the cells of a results file with the run that each came from, and how newer runs replace older cells.

A suite's ``--out`` file is one run: ``environment`` and ``cells``. A file in ``benchmarks/results/`` may hold several:
``runs`` (date, command, versions, device, commit) and ``cells`` whose ``run`` is a place in that list. Both are read.

    python -m benchmarks.merge NEW.json [NEW.json ...]

puts the cells of new runs into ``benchmarks/results/SUITE.json``: a newer cell replaces an older one of the same key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Cell = dict[str, Any]

FOLDER = Path(__file__).parents[1] / "results"
# What tells the cells of a suite apart; suites that are not listed are replaced as a whole.
KEYS: dict[str, tuple[str, ...]] = {
    "accuracy": ("graph", "model", "side", "seed"),
    "epoch": ("shape", "model", "side"),
    "estimates": ("name", "shape", "tasks", "measured"),
    "first_minute": ("shape", "model", "side"),
    "sampled_epoch": ("shape", "case", "tasks", "precision", "side"),
    "sampling": ("work", "shape", "seeds", "rows", "fanout", "side"),
    "settings": ("setting", "case", "side"),
    "spmm": ("shape", "features", "side", "rows"),
    "sweep": ("shape", "model", "precision", "side", "tasks"),
}
WEFT_SIDES = ("weft", "scales", "weights")  # measured again after a change, not to see how runs differ
RUN_PARTS = ("environment", "seconds", "cells", "runs", "benchmark", "summary")


@dataclass
class Results:
    """``runs[i]``: what one run was; ``cells``: each with ``run``, its place in ``runs``."""

    benchmark: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Either kind of file."""
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Results:
        """What either kind of file holds."""
        if "runs" in data:
            return cls(data["benchmark"], data["runs"], data["cells"])
        more = {name: value for name, value in data.items() if name not in RUN_PARTS}
        run = {**data["environment"], **more}
        return cls(data["benchmark"], [run], [{**cell, "run": 0} for cell in data["cells"]])

    @classmethod
    def of(cls, suite: str, folder: Path = FOLDER) -> Results:
        """The results that are kept of a suite."""
        return cls.read(folder / f"{suite}.json")

    def find(self, **wanted: Any) -> Cell | None:
        """The cell with these values that went well."""
        good = (cell for cell in self.cells if cell.get("status", "ok") == "ok")
        return next((c for c in good if all(c.get(k) == v for k, v in wanted.items())), None)

    def any(self, **wanted: Any) -> Cell | None:
        """The cell with these values, whatever became of it."""
        return next((c for c in self.cells if all(c.get(k) == v for k, v in wanted.items())), None)

    def with_newer(self, other: Results) -> Results:
        """Both together: of two cells with one key the one of the newer run stays, unless the older tells more.

        Of a baseline that is replaced the milliseconds stay in ``earlier_ms``: how far runs are apart.
        """
        runs = self.runs + other.runs
        shifted = [{**cell, "run": cell["run"] + len(self.runs)} for cell in other.cells]
        kept: dict[tuple[Any, ...], Cell] = {}
        for cell in [*self.cells, *shifted]:
            key = tuple(cell.get(name) for name in KEYS[self.benchmark])
            kept[key] = _newer(kept.get(key), cell, runs)
        return Results(self.benchmark, runs, list(kept.values()))._without_unused_runs()

    def _without_unused_runs(self) -> Results:
        used = sorted({cell["run"] for cell in self.cells}, key=lambda place: str(self.runs[place].get("date")))
        places = {old: new for new, old in enumerate(used)}
        cells = [{**cell, "run": places[cell["run"]]} for cell in self.cells]
        return Results(self.benchmark, [self.runs[old] for old in used], cells)

    def write(self, path: Path) -> None:
        """In one piece, one cell per line."""
        lines = ",\n  ".join(json.dumps(cell) for cell in self.cells)
        runs = ",\n  ".join(json.dumps(run) for run in self.runs)
        text = f'{{\n "benchmark": "{self.benchmark}",\n "runs": [\n  {runs}\n ],\n "cells": [\n  {lines}\n ]\n}}\n'
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)


def _newer(old: Cell | None, new: Cell, runs: Sequence[dict[str, Any]]) -> Cell:
    if old is None:
        return new
    if str(runs[new["run"]].get("date")) < str(runs[old["run"]].get("date")):
        old, new = new, old
    if _told(new) < _told(old):
        return old
    baseline = "ms" in old and "ms" in new and not str(new.get("side")).startswith(WEFT_SIDES)
    return {**new, "earlier_ms": [*old.get("earlier_ms", []), old["ms"]]} if baseline else new


def _told(cell: Cell) -> int:
    """What a cell tells: a measurement, that it cannot be had, or nothing."""
    return {"ok": 2, "skipped": 0}.get(cell.get("status", "ok"), 1)


class NotKept(Exception):
    """Raised for a run that does not belong among the results."""


def merge(new: Path, folder: Path = FOLDER) -> Path:
    """Put the run in ``new`` into the folder; the file it went to."""
    found = Results.read(new)
    if any("--scale" in str(run.get("command")) for run in found.runs):
        raise NotKept(f"{new}: run with --scale, on graphs of another size; only whole runs are kept")
    path = folder / f"{found.benchmark}.json"
    if found.benchmark in KEYS and path.exists():
        found = Results.read(path).with_newer(found)
        found.write(path)
    else:
        path.write_text(new.read_text(encoding="utf-8"), encoding="utf-8")
    return path
