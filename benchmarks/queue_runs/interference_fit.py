"""Fit the simulator's interference to pairs of tasks that were measured alone and side by side.

A task alone takes ``seconds`` and trains for ``utilisation`` of them, on a GPU after its ``start_seconds``. The model
predicts how long two of them take side by side, with two constants that are not known before: ``share``, the part of
the device that a training keeps busy (the multiprocessors that its kernels fill; on a CPU it is measured, and so 1),
and ``contention``. They are chosen so that predicted and measured times of the pairs are nearest in ratio, each task
weighing as much as it trains: a training of 27 ms took four times as long beside one of 450 ms, which took 1 % longer
(H200, under MPS), and says little of how long a queue takes.

On a GPU these are the times of the epochs, and each task of a pair starts for as long as it did in that very run. A
start is work of the host: how long it takes varies by more than two trainings slow each other down, and a fit to whole
tasks would take that for interference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.sched.baselines import MPSNoAdmission
from weft.sched.interference import Interference
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.simulator import Conditions, Simulation, simulate

STEP, MOST = 0.025, 1.5
SIMPLER = 0.006  # squared log ratio per unit of contention, or of share below 1, that a fit has to save
SHARES = tuple(round(0.3 + 0.05 * place, 2) for place in range(15))


@dataclass(frozen=True)
class Pair:
    """Two tasks as measured alone, and the seconds in which both ended side by side, others wanting ``background``.

    Their ``start_seconds`` are those of the run side by side; only what comes after them is compared.
    """

    tasks: tuple[QueuedTask, QueuedTask]
    together: Mapping[str, float]
    background: float = 0.0


@dataclass(frozen=True)
class Fit:
    """The constants, and how far predictions of the pairs are off with them, as a mean share weighted by work."""

    contention: float
    error: float
    pairs: int
    share: float = 1.0

    @property
    def interference(self) -> Interference:
        """The simulator's model."""
        return Interference(contention=self.contention)


def alone(task: QueuedTask, seconds: float, busy_seconds: float, gap_seconds: float = 0.0) -> QueuedTask:
    """``task`` as it was measured alone; ``gap_seconds`` pass before its worker has the next one."""
    whole = max(seconds + gap_seconds, 1e-6)
    busy = min(max(busy_seconds, 0.0), whole)
    return replace(task, seconds=whole, utilisation=busy / whole, fusable=False, start_seconds=whole - busy)


def replayed(task: QueuedTask, seconds: float) -> QueuedTask:
    """``task`` as it was in a run beside others: it takes ``seconds``, whatever runs beside it in a simulation."""
    return replace(task, seconds=seconds, utilisation=0.0, start_seconds=0.0)


def side_by_side(
    tasks: tuple[QueuedTask, QueuedTask], ends: Mapping[str, float], trained_seconds: Mapping[str, float]
) -> Pair:
    """Two tasks of a GPU as a pair: what they did alone, each begun when it had started in the run side by side."""
    begun = {task.id: max(ends[task.id] - trained_seconds[task.id], 0.0) for task in tasks}
    first, second = (alone(task, begun[task.id] + task.work, task.work) for task in tasks)
    return Pair((first, second), ends)


def fit(pairs: Sequence[Pair], shares: Sequence[float] = SHARES) -> Fit:
    """The share and the contention that explain ``pairs`` best; the model's defaults if there are none."""
    default = Fit(Interference().contention, math.nan, 0)
    if not any(_logs(pair, default) for pair in pairs):
        return default
    steps = [round(place * STEP, 3) for place in range(int(MOST / STEP) + 1)]
    tried = [Fit(contention, math.nan, len(pairs), share) for share in shares for contention in steps]
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
    simulated = together(calibrated(pair.tasks, fitted), fitted.contention, pair.background)
    predicted = {run.id: run.end for run in simulated.tasks}
    begun = {task.id: task.start_seconds for task in pair.tasks}
    work = {task.id: task.work for task in pair.tasks}
    return [
        (math.log((predicted[name] - begun[name]) / (seconds - begun[name])), work[name])
        for name, seconds in pair.together.items()
        if min(seconds, predicted[name]) > begun[name]
    ]


def together(tasks: Sequence[QueuedTask], contention: float, background: float = 0.0) -> Simulation:
    """``tasks`` side by side, all started at once."""
    device = DeviceState("device", 1 << 62, workers=len(tasks))
    return simulate(MPSNoAdmission(), tasks, [device], conditions(contention, background))


def conditions(contention: float, background: float = 0.0) -> Conditions:
    """The simulator's conditions with a fitted constant; starts are part of the measured seconds.

    Nothing pages: a budget below what the device has is kept by admission alone.
    """
    return Conditions(Interference(contention=contention, paging=1.0), background=background)
