"""Figures of the queues and of divided batches: every mode or side, and what was to be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.division_report import Row, rows_of, verdicts
from benchmarks.harness.recorder import find
from benchmarks.harness.results import Results
from benchmarks.queue_runs.queue_tables import goals
from benchmarks.report.markdown import MISSING, MODELS, Legend, kept, not_yet, number, percent, table, times

MODES = {
    "pyg": "PyG, one by one",
    "pyg_mps": "PyG under MPS",
    "pipeswitch": "one at a time (`pipeswitch`)",
    "backfill": "`backfill`",
    "lmcf": "`lmcf`",
    "bmc": "`bmc`",
    "base": "`base`",
    "mps": "`mps`",
}


def queues() -> str:
    """Makespan, mean completion and mean wait of every queue in every mode."""
    results = kept("queues")
    if results is None:
        return not_yet("queues")
    legend, rows = Legend(), []
    for name in _names(results):
        found = [find(results.cells, queue=name, mode=mode) for mode in MODES]
        rows.append([name, *map(_times, found), legend.mark(results, found)])
    return f"{table(['queue', *MODES.values(), 'run'], rows, MODES.values())}\n\n{legend.text()}"


def queue_use() -> str:
    """How busy the device was, and the bytes."""
    results = kept("queues")
    if results is None:
        return not_yet("queues")
    rows = []
    for name in _names(results):
        found = [find(results.cells, queue=name, mode=mode) for mode in MODES]
        rows.append([name, *(percent((cell or {}).get("utilisation")) for cell in found)])
    return table(["queue", *MODES.values()], rows, MODES.values())


def queue_goals() -> str:
    """What was wanted of the default policy and of the simulator, and found on the queues."""
    results = kept("queues")
    return not_yet("queues") if results is None else _shown(goals(results.cells, _names(results)))


def _names(results: Results) -> list[str]:
    return list(dict.fromkeys(str(cell["queue"]) for cell in results.cells))


def _times(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return MISSING
    return " / ".join(number(cell[key]) for key in ("makespan", "mean_jct", "mean_queuing"))


def _shown(rows: Sequence[Sequence[Any]]) -> str:
    texts = [[number(value) if isinstance(value, float) else value or MISSING for value in row] for row in rows]
    return table(["goal", "wanted", "worst", "on", "of all queues", "verdict"], texts)


def division() -> str:
    """Milliseconds per batch of both sides alone and of Weft's division."""
    results = kept("division")
    if results is None:
        return not_yet("division")
    good, legend = [cell for cell in results.cells if cell["status"] == "ok"], Legend()
    rows = [[*_sides(row), legend.mark(results, [row.weft])] for row in rows_of(good)]
    header = ["shape, model", "GiB", "workers", "host alone", "GPU alone", "Weft", "share of the GPU",
              "better side / Weft", "simulated", "CPU, PCIe, GPU busy", "run"]  # fmt: skip
    return f"{table(header, rows, ['GiB'])}\n\n{legend.text()}"


def division_goals() -> str:
    """What was to be shown of dividing, and what was found."""
    results = kept("division")
    if results is None:
        return not_yet("division")
    return table(["to be shown", "", "found"], verdicts([cell for cell in results.cells if cell["status"] == "ok"]))


def _sides(row: Row) -> list[str]:
    weft, error = row.weft, row.weft.get("error")
    shares = list((weft.get("busy") or {}).values())
    busy = [percent(share) for share in shares if any(shares)]  # all zero: the profiler saw nothing
    return [
        f"{row.shape}, {MODELS[row.model]}", MISSING if row.budget is None else f"{row.budget:g}", str(row.workers),
        number(row.host["ms_per_batch"]) if row.host else MISSING, number(row.device["ms_per_batch"]),
        number(weft["ms_per_batch"]), _share(weft) + ("" if row.as_planned else ", not planned"), times(row.gain),
        MISSING if error is None else f"{100 * error:+.0f} %", ", ".join(busy) or MISSING,
    ]  # fmt: skip


def _share(cell: dict[str, Any]) -> str:
    """The share of the batches that the GPU prepares, and how."""
    share, way = cell.get("device_share"), cell.get("division") or {}
    if share is None:
        return "all on the GPU"
    divided = 0 < share < 1
    return number(share, 2) + (", inside of steps" if way.get("in_step") else ", beside training") * divided
