"""Fit the simulator's interference to pairs of tasks that were measured alone and side by side.

A task alone takes ``seconds`` and keeps the device busy for ``utilisation`` of them. The model predicts how long two of
them take side by side, with one constant that is not known before: ``contention``. It is chosen so that predicted and
measured times of the pairs are nearest in ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.sched.interference import Interference
from weft.sched.policies.mps_no_admission import MPSNoAdmission
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.simulation import Simulation
from weft.sched.simulator import Conditions, simulate

STEP, MOST = 0.01, 1.5


@dataclass(frozen=True)
class Pair:
    """Two tasks as measured alone, and the seconds in which both ended side by side."""

    tasks: tuple[QueuedTask, QueuedTask]
    together: Mapping[str, float]


@dataclass(frozen=True)
class Fit:
    """The constant, and how far predictions of the pairs are off with it, as a mean share."""

    contention: float
    error: float
    pairs: int


def alone(task: QueuedTask, seconds: float, busy_seconds: float, gap_seconds: float = 0.0) -> QueuedTask:
    """``task`` as it was measured alone; ``gap_seconds`` pass before its worker has the next one."""
    whole = max(seconds + gap_seconds, 1e-6)
    return replace(task, seconds=whole, utilisation=min(max(busy_seconds / whole, 0.0), 1.0), fusable=False)


def fit(pairs: Sequence[Pair]) -> Fit:
    """The contention that explains ``pairs`` best; the model's default if there are none."""
    if not pairs:
        return Fit(Interference().contention, math.nan, 0)
    steps = [place * STEP for place in range(int(MOST / STEP) + 1)]
    best = min(steps, key=lambda contention: sum(_squares(pair, contention) for pair in pairs))
    errors = [abs(math.expm1(log)) for pair in pairs for log in _logs(pair, best)]
    return Fit(best, sum(errors) / len(errors), len(pairs))


def _squares(pair: Pair, contention: float) -> float:
    return sum(log * log for log in _logs(pair, contention))


def _logs(pair: Pair, contention: float) -> list[float]:
    predicted = {run.id: run.end for run in together(pair.tasks, contention).tasks}
    return [math.log(predicted[name] / seconds) for name, seconds in pair.together.items() if seconds > 0]


def together(tasks: Sequence[QueuedTask], contention: float) -> Simulation:
    """``tasks`` side by side, all started at once."""
    device = DeviceState("device", 1 << 62, workers=len(tasks))
    return simulate(MPSNoAdmission(), tasks, [device], conditions(contention))


def conditions(contention: float) -> Conditions:
    """The simulator's conditions with a fitted constant; starts are part of the measured seconds."""
    return Conditions(Interference(contention=contention))
