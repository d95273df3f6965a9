"""The simulator beside the measured: every mode of a queue simulated from the cells of ``benchmarks.suites.queues``.

Tasks train for what they did one at a time (``pipeswitch``) and have kernels that are as long as that says,
interference is fitted to the pairs of the queue that were measured side by side, and the policy decides by what the
server predicted. A start takes the median of what that task's starts took in the other runs of the queue: the run one
at a time is the first with the plans of the server, and in it single starts take up to three times as long as in all
others. On a GPU one epoch of each start computes: the run of the step before it is captured. No run is told its own
seconds. All of it is read from the results, so that a run that went on later, or in
another process, is compared as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
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
from weft.core.models import BUILT_IN
from weft.planner.cost.rule import LAUNCHES_AROUND
from weft.sched.policies import POLICIES, find_policy
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.simulator import Conditions, Metrics, simulate

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
                starts = {} if mode == ONE else starts_beside(mode, found)
                cell |= simulated(mode, cell, base, fitted, starts)


def starts_beside(mode: str, found: Mapping[str, Cell]) -> dict[str, float]:
    """Seconds that the start of every task took, as the median over the runs of a queue other than ``mode``."""
    rows = [cell for name, cell in found.items() if name in POLICIES and name != mode]
    taken: dict[str, list[float]] = {}
    for cell in rows:
        for task, took in cell["took"].items():
            if task not in cell.get("tried_again", ()):  # such a start has a failed attempt in it
                taken.setdefault(task, []).append(max(took["seconds"] - took["trained_seconds"], 0.0))
    return {task: median(seconds) for task, seconds in taken.items()}


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


def predicted(base: Cell) -> list[QueuedTask]:
    """The tasks as the server predicted them; of a file from before kernels were, with their time by rule of thumb."""
    found = []
    for task in (QueuedTask.from_dict(one) for one in base["predicted"]):
        launches = 0 if task.turn_seconds or _on_cpu(base) else launches_of(task.id)
        found.append(replace(task, turn_seconds=task.work / launches) if launches else task)
    return found


def launches_of(label: str) -> int:
    """Kernels of an epoch by rule of thumb, of a label such as ``00-gcn-7-cora``; 0 if it says nothing of a model.

    All tasks of a queue have the same epochs, and turns count in proportion only.
    """
    parts = label.split("-")
    if len(parts) < 4 or parts[1] not in BUILT_IN or not parts[2].isdecimal():
        return 0
    return BUILT_IN[parts[1]].launches * int(parts[2]) + LAUNCHES_AROUND


def measured_alone(base: Cell, starts: Mapping[str, float] | None = None) -> list[QueuedTask]:
    """The tasks of a run one at a time, each with the seconds and the share of the device that it took.

    ``starts``: what the starts of tasks take on a GPU, in place of what they did in this run. A task has as many
    kernels as were predicted, so that each is longer if its training is.
    """
    tasks, took = predicted(base), base["took"]
    if _on_cpu(base):
        run = TraceRun(base["makespan"], base["background"], took)
        return [run.alone(task, int(base["cores"])) for task in tasks]
    gap = gap_of(base)
    found = []
    for task in tasks:
        whole, trained = took[task.id]["seconds"], took[task.id]["trained_seconds"]
        begun = (starts or {}).get(task.id, whole - trained)
        turn = task.turn_seconds * trained / task.work if task.work else 0.0
        found.append(replace(alone(task, begun + trained, trained, gap), turn_seconds=turn))
    return found


def warmed_up(task: QueuedTask, took: Mapping[str, float]) -> QueuedTask:
    """``task`` with an epoch of its start on the device; as it is if a file has no seconds of an epoch.

    What computes in a start waits as training does: those of 20 GAT, six at a time, took 1.6 times as long (H200, MPS).
    """
    computes = min(took.get("epoch_seconds", 0.0), task.start_seconds)
    return alone(task, task.seconds, task.work + computes) if computes else task


def gap_of(base: Cell) -> float:
    """Seconds from the end of a task to the start of the next one, of a run one at a time."""
    return max(base["makespan"] - sum(one["seconds"] for one in base["took"].values()), 0.0) / len(base["took"])


def simulated(
    mode: str, cell: Cell, base: Cell, fitted: Fit, starts: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Makespan and mean completion time by the simulator, and how far off the makespan is.

    ``replayed_error``: the same with the seconds that the tasks took in the very run, so that only the order of starts
    and the time between two of them can be wrong.
    """
    told = [replace(task, fusable=False) for task in predicted(base)]
    device, others = DeviceState.from_dict(base["device"]), cell["background"] if _on_cpu(base) else 0.0
    about = conditions(fitted.contention, others)
    actual = measured_alone(base, starts)
    if not _on_cpu(base):
        actual = [warmed_up(task, base["took"][task.id]) for task in actual]
    metrics = _metrics(mode, told, device, about, calibrated(actual, fitted))
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
