"""The simulator beside the measured: every mode of a queue simulated from the cells of ``benchmarks.suites.queues``.

Tasks train for what they did one at a time (``pipeswitch``) and have kernels that are as long as that says,
interference is fitted to the pairs of the queue that were measured side by side, and the policy decides by what the
server predicted. A start takes the median of what that task's starts took in the other runs of the queue: the run one
at a time is the first with the plans of the server, and in it single starts take up to three times as long as in all
others. One epoch of each start computes: the run of the step before it is captured. No run is told its own seconds.
All of it is read from the results, so that a run that was resumed is compared as well.

The fit. A task alone takes ``seconds`` and trains for ``utilisation`` of them after its ``start_seconds``. The model
predicts how long two of them take side by side, with two constants that are not known before: ``share``, the part of
the device that a training keeps busy, and ``contention``. They are chosen so that predicted and measured times of the
epochs of the pairs are nearest in ratio, each task weighing as much as it trains: a training of 27 ms took four times
as long beside one of 450 ms, which took 1 % longer (H200, under MPS), and says little of how long a queue takes. Each
task of a pair starts for as long as it did in that very run, since starts vary by more than two trainings slow each
other down, and a fit to whole tasks would take that for interference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from weft.core.models import BUILT_IN
from weft.planner.cost.rule import LAUNCHES_AROUND
from weft.sched.baselines import MPSNoAdmission
from weft.sched.interference import Interference
from weft.sched.policies import POLICIES, find_policy
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.simulator import Conditions, Simulation, simulate

STEP, MOST = 0.025, 1.5
SIMPLER = 0.006  # squared log ratio per unit of contention, or of share below 1, that a fit has to save
SHARES = tuple(round(0.3 + 0.05 * place, 2) for place in range(15))


@dataclass(frozen=True)
class Pair:
    """Two tasks as measured alone, and the seconds in which both ended side by side.

    Their ``start_seconds`` are those of the run side by side; only what comes after them is compared.
    """

    tasks: tuple[QueuedTask, QueuedTask]
    together: Mapping[str, float]


@dataclass(frozen=True)
class Fit:
    """The constants, and how far predictions of the pairs are off with them, as a mean share weighted by work."""

    contention: float
    error: float
    pairs: int
    share: float = 1.0


def alone(task: QueuedTask, seconds: float, busy_seconds: float, gap_seconds: float = 0.0) -> QueuedTask:
    """``task`` as it was measured alone; ``gap_seconds`` pass before its worker has the next one."""
    whole = max(seconds + gap_seconds, 1e-6)
    busy = min(max(busy_seconds, 0.0), whole)
    return replace(task, seconds=whole, utilisation=busy / whole, fusable=False, start_seconds=whole - busy)


def side_by_side(
    tasks: tuple[QueuedTask, QueuedTask], ends: Mapping[str, float], trained_seconds: Mapping[str, float]
) -> Pair:
    """Two tasks as a pair: what they did alone, each begun when it had started in the run side by side."""
    begun = {task.id: max(ends[task.id] - trained_seconds[task.id], 0.0) for task in tasks}
    first, second = (alone(task, begun[task.id] + task.work, task.work) for task in tasks)
    return Pair((first, second), ends)


def fit(pairs: Sequence[Pair]) -> Fit:
    """The share and the contention that explain ``pairs`` best; the model's defaults if there are none."""
    default = Fit(Interference().contention, math.nan, 0)
    if not any(_logs(pair, default) for pair in pairs):
        return default
    steps = [round(place * STEP, 3) for place in range(int(MOST / STEP) + 1)]
    tried = [Fit(contention, math.nan, len(pairs), share) for share in SHARES for contention in steps]
    best = min(tried, key=lambda one: _misfit(pairs, one))
    misses = [(abs(math.expm1(log)), work) for pair in pairs for log, work in _logs(pair, best)]
    return replace(best, error=sum(miss * work for miss, work in misses) / sum(work for _, work in misses))


def _misfit(pairs: Sequence[Pair], fitted: Fit) -> float:
    """How far the pairs are off, squared; of what explains them about as well, the model with less in it is nearer.

    A smaller share and more contention look alike in pairs, and differ by a quarter when six tasks run.
    """
    misses = [one for pair in pairs for one in _logs(pair, fitted)]
    whole = sum(work for _, work in misses)
    return sum(work * log * log for log, work in misses) + SIMPLER * whole * (fitted.contention + 1.0 - fitted.share)


def calibrated(tasks: Sequence[QueuedTask], fitted: Fit) -> list[QueuedTask]:
    """``tasks`` as measured alone, each with the part of the device that it keeps busy."""
    return [replace(task, utilisation=task.utilisation * fitted.share) for task in tasks]


def _logs(pair: Pair, fitted: Fit) -> list[tuple[float, float]]:
    """Of every task the log ratio of predicted to measured seconds, and the seconds that it trains alone."""
    simulated = together(calibrated(pair.tasks, fitted), fitted.contention)
    predicted = {run.id: run.end for run in simulated.tasks}
    begun = {task.id: task.start_seconds for task in pair.tasks}
    work = {task.id: task.work for task in pair.tasks}
    return [
        (math.log((predicted[name] - begun[name]) / (seconds - begun[name])), work[name])
        for name, seconds in pair.together.items()
        if min(seconds, predicted[name]) > begun[name]
    ]


def together(tasks: Sequence[QueuedTask], contention: float) -> Simulation:
    """``tasks`` side by side, all started at once."""
    device = DeviceState("device", 1 << 62, workers=len(tasks))
    return simulate(MPSNoAdmission(), tasks, [device], conditions(contention))


def conditions(contention: float) -> Conditions:
    """The simulator's conditions with a fitted constant; starts are part of the measured seconds.

    Nothing pages: a budget below what the device has is kept by admission alone.
    """
    return Conditions(Interference(contention=contention, paging=1.0))


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
    pairs = []
    for one in found.get(PAIRS, {}).get("pairs", ()):
        first, second = (tasks[name] for name in one["tasks"])
        pairs.append(side_by_side((first, second), one["ends"], one["trained"]))
    return fit(pairs)


def predicted(base: Cell) -> list[QueuedTask]:
    """The tasks as the server predicted them; of a file from before kernels were, with their time by rule of thumb."""
    found = []
    for task in (QueuedTask.from_dict(one) for one in base["predicted"]):
        launches = 0 if task.turn_seconds else launches_of(task.id)
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

    ``starts``: what the starts of tasks take, in place of what they did in this run. A task has as many
    kernels as were predicted, so that each is longer if its training is.
    """
    tasks, took = predicted(base), base["took"]
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
    """Makespan and mean completion time by the simulator, and how far off the makespan is."""
    told = [replace(task, fusable=False) for task in predicted(base)]
    device, about = DeviceState.from_dict(base["device"]), conditions(fitted.contention)
    actual = [warmed_up(task, base["took"][task.id]) for task in measured_alone(base, starts)]
    metrics = simulate(find_policy(mode), told, [device], about, mode, calibrated(actual, fitted)).metrics()
    return {
        "simulated_makespan": metrics.makespan,
        "simulated_mean_jct": metrics.mean_jct,
        "simulator_error": metrics.makespan / cell["makespan"] - 1,
    }
