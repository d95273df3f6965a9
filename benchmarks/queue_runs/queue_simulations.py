"""The simulator beside the measured: every mode of a queue simulated from the cells of ``benchmarks.suites.queues``.

Tasks take what they took one at a time (``pipeswitch``), interference is fitted to the pairs of the queue that were
measured side by side, and the policy decides by what the server predicted. All of it is read from the results, so that
a run that went on later, or in another process, is compared as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.queue_runs.check_trace import TraceRun
from benchmarks.queue_runs.interference_fit import (
    SHARES,
    Fit,
    Pair,
    alone,
    calibrated,
    conditions,
    fit,
    replayed,
    side_by_side,
)
from weft.sched.policies import POLICIES, find_policy
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.simulation import Metrics
from weft.sched.simulator import Conditions, simulate

ONE, PAIRS = "pipeswitch", "pairs"
Cell = dict[str, Any]


def add_simulations(cells: Sequence[Cell], queues: Iterable[str] | None = None) -> None:
    """Write into every measured cell, of some queues or all, what the simulator says of it."""
    for name in dict.fromkeys(cell["queue"] for cell in cells) if queues is None else queues:
        found = {cell["mode"]: cell for cell in cells if cell["queue"] == name and cell["status"] == "ok"}
        base = found.get(ONE)
        if base is None or base["failed"]:
            continue
        fitted = fit_of(found, base)
        for mode, cell in found.items():
            if mode in POLICIES and not cell["failed"]:
                cell |= simulated(mode, cell, base, fitted)


def fit_of(found: Mapping[str, Cell], base: Cell) -> Fit:
    """The constants of the interference of a queue's tasks; the defaults without pairs."""
    tasks = {task.id: task for task in measured_alone(base)}
    on_cpu = _on_cpu(base)
    pairs = [_pair(one, tasks, on_cpu) for one in found.get(PAIRS, {}).get("pairs", ())]
    return fit(pairs, (1.0,) if on_cpu else SHARES)


def _pair(one: Cell, tasks: Mapping[str, QueuedTask], on_cpu: bool) -> Pair:
    first, second = (tasks[name] for name in one["tasks"])
    if on_cpu:
        return Pair((first, second), one["ends"], one["background"])
    if "trained" not in one:  # a file that was begun before pairs had it: they start as they do alone
        return Pair((first, second), one["ends"])
    return side_by_side((first, second), one["ends"], one["trained"])


def _on_cpu(base: Cell) -> bool:
    return str(base["device"]["name"]).startswith("cpu")


def measured_alone(base: Cell) -> list[QueuedTask]:
    """The tasks of a run one at a time, each with the seconds and the share of the device that it took."""
    tasks, took = [QueuedTask.from_dict(task) for task in base["predicted"]], base["took"]
    if _on_cpu(base):
        run = TraceRun(base["makespan"], base["background"], took)
        return [run.alone(task, int(base["cores"])) for task in tasks]
    gap = gap_of(base)
    return [alone(task, took[task.id]["seconds"], took[task.id]["trained_seconds"], gap) for task in tasks]


def gap_of(base: Cell) -> float:
    """Seconds from the end of a task to the start of the next one, of a run one at a time."""
    return max(base["makespan"] - sum(one["seconds"] for one in base["took"].values()), 0.0) / len(base["took"])


def simulated(mode: str, cell: Cell, base: Cell, fitted: Fit) -> dict[str, float]:
    """Makespan and mean completion time by the simulator, and how far off the makespan is.

    ``replayed_error``: the same with the seconds that the tasks took in the very run, so that only the order of starts
    and the time between two of them can be wrong.
    """
    told = [replace(QueuedTask.from_dict(task), fusable=False) for task in base["predicted"]]
    device, others = DeviceState.from_dict(base["device"]), cell["background"] if _on_cpu(base) else 0.0
    about = conditions(fitted.contention, others)
    metrics = _metrics(mode, told, device, about, calibrated(measured_alone(base), fitted))
    gap = gap_of(base)
    again = _metrics(
        mode, told, device, conditions(0.0), [replayed(t, cell["took"][t.id]["seconds"] + gap) for t in told]
    )
    return {
        "simulated_makespan": metrics.makespan,
        "simulated_mean_jct": metrics.mean_jct,
        "simulator_error": metrics.makespan / cell["makespan"] - 1,
        "replayed_error": again.makespan / cell["makespan"] - 1,
    }


def _metrics(
    mode: str, told: Sequence[QueuedTask], device: DeviceState, about: Conditions, actual: Iterable[QueuedTask]
) -> Metrics:
    return simulate(find_policy(mode), told, [device], about, mode, actual).metrics()
