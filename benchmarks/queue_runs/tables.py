"""What ``benchmarks.suites.queues`` prints: all cells as a table, and which of the goals they reach.

    python -m benchmarks.queue_runs.tables queues.json      both again, from the results

A goal is reached if it is on every queue: its figure is that of the worst one. ``no figure`` says which cells it lacks.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.recorder import find
from benchmarks.harness.results import Results
from benchmarks.queue_runs.simulations import ONE

GIB = 1 << 30
BASELINE, DEFAULT = "pyg", "backfill"
ADMITTING = (ONE, "base", "lmcf", "bmc", DEFAULT)  # keep to the budget; mps does not, by design
SIMULATED = ("base", "lmcf", "bmc", "mps", DEFAULT)  # one at a time the simulator has the run's own seconds
Cell = Mapping[str, Any]
Row = list[Any]
PASS, MISS, UNKNOWN = "pass", "MISS", "no figure"
SIGNS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "=": operator.eq}


def goals(cells: Sequence[Cell], queues: Sequence[str]) -> list[Row]:
    """A row per goal: its name, what is wanted, the worst figure, the queue of it, the figures, the verdict."""

    def over(other: str, figure: str, planning: bool = False) -> dict[str, float]:
        """How many times longer another mode takes than the default policy; ``planning``: Weft's is counted as well."""
        found = {}
        for queue in queues:
            base, ours = (find(cells, queue=queue, mode=mode) for mode in (other, DEFAULT))
            first = find(cells, queue=queue, mode=ONE)  # the first of a queue's modes plans its tasks for all
            if base and ours and base["done"] == ours["done"] > 0 and (first or not planning):
                more = float(first["planning_seconds"]) if first and planning else 0.0
                found[queue] = base[figure] / max(ours[figure] + more, 1e-9)
        return found

    def joined(figure: Callable[[Cell], float | None], modes: Sequence[str], join: Callable[..., float] = max) -> Any:
        """The largest figure, or the sum, over some modes of every queue."""
        found = {}
        for queue in queues:
            here = (find(cells, queue=queue, mode=mode) for mode in modes)
            values = [value for cell in here if cell and (value := figure(cell)) is not None]
            found |= {queue: float(join(values))} if values else {}
        return found

    def error(cell: Cell) -> float | None:
        return abs(cell["simulator_error"]) if "simulator_error" in cell else None

    def taken(cell: Cell) -> float | None:
        """The most bytes that the device had taken, of the budget and what is reserved beside it."""
        if cell.get("device_peak_bytes") is None or not cell.get("reserved_bytes"):
            return None
        return float(cell["device_peak_bytes"] / (cell["budget_bytes"] + cell["reserved_bytes"]))

    rows = [
        ("makespan: PyG one by one / Weft", ">= 5", over(BASELINE, "makespan")),
        ("mean JCT: PyG one by one / Weft", ">= 10", over(BASELINE, "mean_jct")),
        ("mean wait: PyG one by one / Weft", ">= 15", over(BASELINE, "mean_queuing")),
        ("mean JCT: LMCF / Weft", "> 1", over("lmcf", "mean_jct")),
        ("makespan: BMC / Weft", "> 1", over("bmc", "makespan")),
        ("simulated makespan off by, worst policy", "<= 0.1", joined(error, SIMULATED)),
        ("out of memory", "= 0", joined(lambda cell: cell["out_of_memory"], ADMITTING, sum)),
        ("tasks that failed", "= 0", joined(lambda cell: len(cell["failed"]), ADMITTING, sum)),
        ("admitted / budget for tasks", "<= 1", joined(lambda c: c["peak_bytes"] / c["budget_bytes"], ADMITTING)),
        ("device's peak / whole budget", "<= 1", joined(taken, ADMITTING)),
        ("makespan with planning, for comparison", "-", over(BASELINE, "makespan", planning=True)),
    ]
    return [_row(name, wanted, found, queues) for name, wanted, found in rows]


def team_verdicts(cells: Sequence[Cell]) -> list[Row]:
    """A row per goal of the team's queue: its name, what is wanted, what was found, the verdict."""
    found = {mode: find(cells, mode=mode) for mode in ("backfill", "unfused", "lmcf", "sequential", "pyg-mps")}
    ours = found["backfill"]

    def over(mode: str, figure: str) -> float | None:
        other = found[mode]
        if ours is None or other is None or ours["tasks"] != other["tasks"]:
            return None
        return float(other[figure] / max(ours[figure], 1e-9))

    weft = [cell for mode, cell in found.items() if cell is not None and mode != "pyg-mps"]
    peaks = [
        cell["device_peak_bytes"] / (cell["budget_bytes"] + cell["reserved_bytes"])
        for cell in weft
        if cell.get("device_peak_bytes") is not None
    ]
    rows = [
        ("makespan: nothing fused / Weft", ">= 1.5", over("unfused", "makespan")),
        ("mean JCT: nothing fused / Weft", "-", over("unfused", "mean_jct")),
        ("makespan: LMCF / Weft", "-", over("lmcf", "makespan")),
        ("makespan: one at a time / Weft", "-", over("sequential", "makespan")),
        ("makespan: PyG under MPS / Weft", "-", over("pyg-mps", "makespan")),
        ("mean JCT: PyG under MPS / Weft", "-", over("pyg-mps", "mean_jct")),
        ("out of memory, all of Weft's modes", "= 0", float(sum(c["out_of_memory"] for c in weft)) if weft else None),
        ("tasks that failed, all of Weft's modes", "= 0", float(sum(len(c["failed"]) for c in weft)) if weft else None),
        ("device's peak / whole budget, worst", "<= 1", max(peaks, default=None)),
    ]
    return [_verdict(name, wanted, value) for name, wanted, value in rows]


def _verdict(name: str, wanted: str, value: float | None) -> Row:
    sign, _, bound = wanted.partition(" ")
    if value is None:
        return [name, wanted.removeprefix("= "), None, UNKNOWN]
    verdict = "-" if not bound else PASS if SIGNS[sign](value, float(bound)) else MISS
    return [name, wanted.removeprefix("= "), value, verdict]


def _row(name: str, wanted: str, found: Mapping[str, float], queues: Sequence[str]) -> Row:
    sign, _, bound = wanted.partition(" ")
    shown = wanted.removeprefix("= ")
    if not found:
        return [name, shown, None, None, None, UNKNOWN]
    at = (max if sign in ("<=", "=") else min)(found, key=lambda queue: found[queue])
    figures = " ".join(f"{queue} {value:.3g}" for queue, value in found.items())
    lacking = [queue for queue in queues if queue not in found]
    verdict = f"{UNKNOWN} of {', '.join(lacking)}" if lacking else PASS if bound else "-"
    verdict = MISS if bound and not SIGNS[sign](found[at], float(bound)) else verdict
    return [name, shown, found[at], at, f"{figures} (median {median(found.values()):.3g})", verdict]


def main() -> None:
    """Print the tables of a results file."""
    from benchmarks.report import runs

    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.queue_runs.tables queues.json")
    results = Results.read(Path(sys.argv[1]))
    print(*(table(results) for table in (runs.queues, runs.queue_use, runs.queue_goals)), sep="\n\n")


if __name__ == "__main__":
    main()
