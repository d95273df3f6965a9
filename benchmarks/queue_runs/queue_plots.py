"""The charts of ``benchmarks.suites.queues`` from its results file: completion times and Gantt charts per queue.

python -m benchmarks.queue_runs.queue_plots queues.json     queues-QUEUE-cdf.svg and -gantt.svg beside it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.queue_runs.cdf_plot import cdf_svg
from weft.sched.gantt import gantt_svg
from weft.sched.simulator import SimulatedGroup, Simulation, TaskRun

Cell = Mapping[str, Any]


def group_rows(groups: Iterable[SimulatedGroup]) -> list[list[Any]]:
    """Groups as plain data, of which :func:`outcome_of` makes them again."""
    return [[g.id, g.worker, list(g.members), g.bytes, round(g.start, 4), round(g.end, 4), g.why] for g in groups]


def outcome_of(cell: Cell, budget: int = 0) -> Simulation:
    """A measured cell as the charts take it; ``budget`` is drawn where the cell had none, as PyG."""
    groups = tuple(
        SimulatedGroup(name, "worker", worker, tuple(members), size, start, end, why)
        for name, worker, members, size, start, end, why in cell["group_rows"]
    )
    of_task = {member: group.id for group in groups for member in group.members}
    runs = tuple(TaskRun(name, of_task.get(name, name), 0.0, *times) for name, times in cell["tasks"].items())
    return Simulation(cell["mode"], runs, groups, budget_bytes=int(cell.get("budget_bytes") or budget))


def write_plots(cells: Sequence[Cell], out: Path) -> list[Path]:
    """The charts of every queue beside ``out``; the files."""
    written = []
    for name in dict.fromkeys(cell["queue"] for cell in cells):
        mine = [cell for cell in cells if cell["queue"] == name and cell["status"] == "ok" and "group_rows" in cell]
        budget = max((int(cell.get("budget_bytes") or 0) for cell in mine), default=0)
        outcomes = {cell["mode"]: outcome_of(cell, budget) for cell in mine}
        if not outcomes:
            continue
        completion = {mode: [run.completion_seconds for run in one.tasks] for mode, one in outcomes.items()}
        charts = {"cdf": cdf_svg(f"{name} queue: job completion time", completion)}
        charts["gantt"] = gantt_svg(list(outcomes.values()))
        for kind, text in charts.items():
            written.append(out.with_name(f"{out.stem}-{name}-{kind}.svg"))
            written[-1].write_text(text, encoding="utf-8")
    return written


def main() -> None:
    """Draw the charts of a results file."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.queue_runs.queue_plots queues.json")
    path = Path(sys.argv[1])
    for file in write_plots(json.loads(path.read_text(encoding="utf-8"))["cells"], path):
        print(file)


if __name__ == "__main__":
    main()
