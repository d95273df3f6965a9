"""What ``benchmarks.suites.queues`` prints: all cells as a table, and which of the goals they reach.

    python -m benchmarks.queue_runs.tables queues.json      both again, from the results

A goal is reached if it is on every queue: its figure is that of the worst one. ``no figure`` says which cells it lacks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.recorder import find, print_table
from benchmarks.queue_runs.simulations import ONE, PAIRS

GIB = 1 << 30
BASELINE, DEFAULT = "pyg", "backfill"
ADMITTING = (ONE, "base", "lmcf", "bmc", DEFAULT)  # keep to the budget; mps does not, by design
SIMULATED = ("base", "lmcf", "bmc", "mps", DEFAULT)  # one at a time the simulator has the run's own seconds
Cell = Mapping[str, Any]
Row = list[Any]
PASS, MISS, UNKNOWN = "pass", "MISS", "no figure"


def print_tables(cells: Sequence[Cell], queues: Sequence[str]) -> None:
    """All cells, what went wrong, and the goals last."""
    print_cells(cells)
    for cell in cells:
        if cell["status"] != "ok" or cell.get("failed"):
            print(f"{cell['queue']} {cell['mode']}: {cell.get('error') or cell.get('reason') or cell.get('failed')}")
    print()
    print_table(["goal", "wanted", "worst", "on", "of all queues", "verdict"], goals(cells, queues))


def print_cells(cells: Sequence[Cell]) -> None:
    """The table of all cells, and each mode against sequential PyG."""
    rows = []
    for cell in (cell for cell in cells if cell["status"] == "ok" and cell["mode"] != PAIRS):
        base = find(cells, queue=cell["queue"], mode=BASELINE)
        against = [
            base[key] / cell[key] if base and cell[key] else None for key in ("makespan", "mean_jct", "mean_queuing")
        ]
        busy, peak = cell.get("utilisation"), cell.get("device_peak_bytes")
        rows.append([
            cell["queue"], cell["mode"], cell["makespan"], cell["mean_jct"], cell["p95_jct"], cell["mean_queuing"],
            cell["p95_queuing"], *against, busy, cell["peak_bytes"] / GIB, None if peak is None else peak / GIB,
            cell["out_of_memory"], cell["done"], cell.get("planning_seconds"), cell.get("simulated_makespan"),
            cell.get("simulator_error"), cell.get("replayed_error"),
        ])  # fmt: skip
    print_table(
        ["queue", "mode", "makespan s", "JCT s", "p95 JCT", "wait s", "p95 wait", "x makespan", "x JCT", "x wait",
         "busy", "admitted GiB", "device GiB", "OOM", "done", "planned in s", "simulated s", "error", "replayed"],
        rows,
    )  # fmt: skip


# ---- goals -----------------------------------------------------------------------------------------------


def goals(cells: Sequence[Cell], queues: Sequence[str]) -> list[Row]:
    """A row per goal: its name, what is wanted, the worst figure, the queue of it, the figures, the verdict."""
    ratio = _Ratios(cells, queues)
    return [
        ratio.row("makespan: PyG one by one / Weft", 5.0, BASELINE, "makespan"),
        ratio.row("mean JCT: PyG one by one / Weft", 10.0, BASELINE, "mean_jct"),
        ratio.row("mean wait: PyG one by one / Weft", 15.0, BASELINE, "mean_queuing"),
        ratio.row("mean JCT: LMCF / Weft", 1.0, "lmcf", "mean_jct"),
        ratio.row("makespan: BMC / Weft", 1.0, "bmc", "makespan"),
        _simulator(cells, queues),
        _count("out of memory", cells, queues, lambda cell: cell["out_of_memory"]),
        _count("tasks that failed", cells, queues, lambda cell: len(cell["failed"])),
        _admitted(cells, queues),
        _taken(cells, queues),
        ratio.row("makespan with planning, for comparison", None, BASELINE, "makespan", planning=True),
    ]


class _Ratios:
    """How many times longer another mode takes than the default policy, per queue."""

    def __init__(self, cells: Sequence[Cell], queues: Sequence[str]) -> None:
        self._cells, self._queues = cells, queues

    def row(self, name: str, wanted: float | None, other: str, figure: str, planning: bool = False) -> Row:
        """A goal: at least ``wanted``, and more than it if that is 1. ``planning``: Weft's is counted as well."""
        found: dict[str, float] = {}
        for queue in self._queues:
            base, ours = (find(self._cells, queue=queue, mode=mode) for mode in (other, DEFAULT))
            first = find(self._cells, queue=queue, mode=ONE)  # the first of a queue's modes plans its tasks for all
            if base and ours and base["done"] == ours["done"] > 0 and (first or not planning):
                more = float(first["planning_seconds"]) if first and planning else 0.0
                found[queue] = base[figure] / max(ours[figure] + more, 1e-9)
        enough = lambda value: wanted is None or (value > wanted if wanted == 1.0 else value >= wanted)  # noqa: E731
        sign = "" if wanted is None else f"> {wanted:g}" if wanted == 1.0 else f">= {wanted:g}"
        made = _row(name, sign, found, self._queues, min, enough)
        return made if wanted is not None or made[-1] == UNKNOWN else [*made[:-1], ""]


def _simulator(cells: Sequence[Cell], queues: Sequence[str]) -> Row:
    """How far the simulator's makespan is off: of each queue the policy for which it is worst."""
    found = {}
    for queue in queues:
        errors = [
            abs(cell["simulator_error"])
            for mode in SIMULATED
            if (cell := find(cells, queue=queue, mode=mode)) is not None and "simulator_error" in cell
        ]
        if errors:
            found[queue] = max(errors)
    return _row("simulated makespan off by, worst policy", "<= 0.1", found, queues, max, lambda value: value <= 0.1)


def _count(name: str, cells: Sequence[Cell], queues: Sequence[str], of: Callable[[Cell], int]) -> Row:
    found = {queue: float(sum(of(cell) for cell in mine)) for queue, mine in _admitting(cells, queues)}
    return _row(name, "0", found, queues, max, lambda value: value == 0)


def _admitted(cells: Sequence[Cell], queues: Sequence[str]) -> Row:
    """The most bytes that were set aside at once, of the budget for tasks."""
    found = {
        q: max(cell["peak_bytes"] / cell["budget_bytes"] for cell in mine) for q, mine in _admitting(cells, queues)
    }
    return _row("admitted / budget for tasks", "<= 1", found, queues, max, lambda value: value <= 1.0)


def _taken(cells: Sequence[Cell], queues: Sequence[str]) -> Row:
    """The most bytes that the device had taken, of the budget and what is reserved beside it."""
    found = {}
    for queue, mine in _admitting(cells, queues):
        shares = [
            cell["device_peak_bytes"] / (cell["budget_bytes"] + cell["reserved_bytes"])
            for cell in mine
            if cell.get("device_peak_bytes") is not None and cell.get("reserved_bytes")
        ]
        if shares:
            found[queue] = max(shares)
    return _row("device's peak / whole budget", "<= 1", found, queues, max, lambda value: value <= 1.0)


def _admitting(cells: Sequence[Cell], queues: Sequence[str]) -> Iterable[tuple[str, list[Cell]]]:
    for queue in queues:
        mine = [cell for mode in ADMITTING if (cell := find(cells, queue=queue, mode=mode)) is not None]
        if mine:
            yield queue, mine


def _row(
    name: str, wanted: str, found: Mapping[str, float], queues: Sequence[str],
    worst: Callable[..., str], enough: Callable[[float], bool],
) -> Row:  # fmt: skip
    if not found:
        return [name, wanted, None, None, None, UNKNOWN]
    at = worst(found, key=lambda queue: found[queue])
    figures = " ".join(f"{queue} {value:.3g}" for queue, value in found.items())
    lacking = [queue for queue in queues if queue not in found]
    verdict = MISS if not enough(found[at]) else f"{UNKNOWN} of {', '.join(lacking)}" if lacking else PASS
    return [name, wanted, found[at], at, f"{figures} (median {median(found.values()):.3g})", verdict]


def main() -> None:
    """Print the tables of a results file."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.queue_runs.tables queues.json")
    cells = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"]
    print_tables(cells, list(dict.fromkeys(cell["queue"] for cell in cells)))


if __name__ == "__main__":
    main()
