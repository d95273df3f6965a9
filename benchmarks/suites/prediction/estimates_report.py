"""How far estimates are from measurements: errors of memory and time, ranking, a CSV of all points and a plot."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.recorder import print_table
from benchmarks.harness.scatter import Point, write_scatter
from weft.planner.cost.calibration import Calibration, Observation
from weft.planner.cost.memory import SAFETY_FACTOR, upper_bound

Cell = dict[str, Any]
COLUMNS = (
    "measured", "set", "queue", "name", "shape", "layers", "tasks", "fits", "allocated", "estimated_allocated",
    "allocated_error", "reserved", "estimated_reserved", "reserved_error", "seconds", "estimated_seconds",
    "calibrated_seconds", "estimate_seconds", "unknown", "note",
)  # fmt: skip


def error(cell: Cell, name: str) -> float | None:
    """``estimate / measured - 1``; None where nothing was measured."""
    measured = cell.get(name)
    return cell[f"estimated_{name}"] / measured - 1.0 if measured else None


def usable(cells: Sequence[Cell]) -> list[Cell]:
    """Cells that were run."""
    return [cell for cell in cells if cell["status"] == "ok" and cell.get("fits")]


def timed(cells: Sequence[Cell]) -> list[Cell]:
    """Cells whose time counts: not those that were run while others used the device as well."""
    return [cell for cell in usable(cells) if cell.get("seconds") and cell.get("measured") != "memory"]


def weighed(cells: Sequence[Cell]) -> list[Cell]:
    """Cells whose memory counts; a results file may have it and the time from different runs (``measured``)."""
    return [cell for cell in usable(cells) if cell.get("measured") != "time"]


# ---- time --------------------------------------------------------------------------------------------


def calibrated(cells: Sequence[Cell]) -> list[float | None]:
    """Seconds of every cell with factors fitted to the other half of the cells."""
    run = timed(cells)
    halves = [Calibration().with_observations(_observation(cell) for cell in run[1 - half :: 2]) for half in (0, 1)]
    found = {id(cell): _corrected(cell, halves[place % 2]) for place, cell in enumerate(run)}
    return [found.get(id(cell)) for cell in cells]


def _observation(cell: Cell) -> Observation:
    return Observation(cell["families"], cell["seconds"], cell["name"])


def _corrected(cell: Cell, calibration: Calibration) -> float:
    return sum(calibration.factor(name) * seconds for name, seconds in cell["families"].items())


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The correlation of ranks; equal values share theirs. None for fewer than two points."""
    if len(one) < 2:
        return None
    a, b = ranks(one), ranks(other)
    middle = (len(one) - 1) / 2
    cross = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    spread = (sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)) ** 0.5
    return cross / spread if spread else None


def ranks(values: Sequence[float]) -> list[float]:
    """The place of every value among all, from 0; the mean place for equal ones."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin
        while end + 1 < len(order) and values[order[end + 1]] == values[order[begin]]:
            end += 1
        for place in order[begin : end + 1]:
            found[place] = (begin + end) / 2
        begin = end + 1
    return found


# ---- summary -----------------------------------------------------------------------------------------


def groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells by set and T, and all of them but PyG's, which have a bound of their own."""
    run = usable(cells)
    found: dict[str, list[Cell]] = {}
    for cell in run:
        found.setdefault(f"{cell['set']} T={cell['tasks']}", []).append(cell)
    return {**found, "all but opaque": [cell for cell in run if cell["set"] != "opaque"]}


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """Errors by group of cells; time before and after calibration; how long the estimates took."""
    after = dict(zip(map(id, cells), calibrated(cells), strict=True))
    found = {name: _group(chosen, after) for name, chosen in groups(cells).items() if chosen}
    takes = [cell["estimate_seconds"] for cell in cells if cell["status"] == "ok"]
    return {
        "groups": found,
        "margin": SAFETY_FACTOR,
        "does_not_fit": sum(cell["status"] == "ok" and not cell["fits"] for cell in cells),
        "unknown": sorted({name for cell in usable(cells) for name in cell["unknown"]}),
        "estimate_seconds": {"median": median(takes), "worst": max(takes)} if takes else None,
    }


def _group(cells: list[Cell], after: dict[int, float | None]) -> dict[str, Any]:
    held = weighed(cells)
    found: dict[str, Any] = {"cells": len(held)}
    for name in ("allocated", "reserved"):
        errors = [e for e in (error(cell, name) for cell in held) if e is not None]
        if errors:
            below = sum((cell[name] or 0) > upper_bound(cell[f"estimated_{name}"]) for cell in held)
            found[name] = {"worst": max(map(abs, errors)), "median": median(map(abs, errors)),
                           "lowest": min(errors), "below_with_margin": below}  # fmt: skip
    clocked = timed(cells)
    measured = [cell["seconds"] for cell in clocked]
    plain = [cell["estimated_seconds"] for cell in clocked]
    fitted = [after[id(cell)] or 0.0 for cell in clocked]
    found["timed_cells"] = len(clocked)
    if clocked:
        found["time"] = {"before": _time(plain, measured), "after": _time(fitted, measured)}
    return found


def _time(estimated: list[float], measured: list[float]) -> dict[str, float | None]:
    errors = [abs(e / m - 1.0) for e, m in zip(estimated, measured, strict=True)]
    return {"median": median(errors), "worst": max(errors), "spearman": spearman(estimated, measured)}


def print_summary(found: dict[str, Any]) -> None:
    """The table in Markdown, errors in per cent."""
    rows = []
    for name, one in found["groups"].items():
        row: list[Any] = [name, one["cells"]]
        for account in ("allocated", "reserved"):
            about = one.get(account)
            row += [100 * about["worst"], 100 * about["median"], about["below_with_margin"]] if about else [None] * 3
        for when in ("before", "after"):
            about = one["time"][when] if "time" in one else None
            row += [100 * about["median"], about["spearman"]] if about else [None, None]
        rows.append(row)
    print_table(
        ["set", "cells", "allocated worst %", "median %", "below with margin", "reserved worst %", "median %",
         "below with margin", "time median %", "Spearman", "calibrated median %", "Spearman"],
        rows,
    )  # fmt: skip
    print(f"margin {found['margin']}")
    print(f"{found['does_not_fit']} were not run because they do not fit")
    if found["estimate_seconds"]:
        takes = found["estimate_seconds"]
        print(f"an estimate takes {takes['median']:.2f} s (median), {takes['worst']:.2f} s at worst")
    if found["unknown"]:
        print(f"operators without a cost: {', '.join(found['unknown'])}")


# ---- files -------------------------------------------------------------------------------------------


def write_csv(path: Path, cells: Sequence[Cell]) -> None:
    """All points, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for cell, seconds in zip(cells, calibrated(cells), strict=True):
            if cell["status"] != "ok":
                continue
            errors = {f"{name}_error": error(cell, name) for name in ("allocated", "reserved")}
            row = {**cell, **errors, "calibrated_seconds": seconds, "unknown": " ".join(cell["unknown"])}
            writer.writerow({name: "" if row.get(name) is None else row[name] for name in COLUMNS})


def write_plot(path: Path, cells: Sequence[Cell]) -> None:
    """Allocated bytes, reserved bytes and calibrated seconds, estimate over measurement."""
    after = dict(zip(map(id, cells), calibrated(cells), strict=True))

    def points(measured: str, estimate: Any, factor: float) -> list[Point]:
        run = timed(cells) if measured == "seconds" else weighed(cells)
        return [
            Point(factor * cell[measured], factor * estimate(cell), f"{cell['set']} T={cell['tasks']}",
                  f"{cell['name']} on {cell['shape']}, T={cell['tasks']}")
            for cell in run if cell.get(measured)
        ]  # fmt: skip

    write_scatter(
        path,
        [
            ("peak allocated", "GB", points("allocated", lambda cell: cell["estimated_allocated"], 1e-9)),
            ("peak reserved", "GB", points("reserved", lambda cell: cell["estimated_reserved"], 1e-9)),
            ("epoch, calibrated", "ms", points("seconds", lambda cell: after[id(cell)], 1e3)),
        ],
    )
