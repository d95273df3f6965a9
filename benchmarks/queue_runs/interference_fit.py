"""Fit the simulator's interference to pairs of tasks that were measured alone and side by side.

A task alone takes ``seconds`` and trains for ``utilisation`` of them. The model predicts how long two of them take side
by side, with two constants that are not known before: ``share``, the part of the device that a training keeps busy (the
multiprocessors that its kernels fill; on a CPU it is measured, and so 1), and ``contention``. They are chosen so that
predicted and measured times of the pairs are nearest in ratio.
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

STEP, MOST = 0.025, 1.5
SHARES = tuple(round(0.3 + 0.05 * place, 2) for place in range(15))


@dataclass(frozen=True)
class Pair:
    """Two tasks as measured alone, and the seconds in which both ended side by side, others wanting ``background``."""

    tasks: tuple[QueuedTask, QueuedTask]
    together: Mapping[str, float]
    background: float = 0.0


@dataclass(frozen=True)
class Fit:
    """The constants, and how far predictions of the pairs are off with them, as a mean share."""

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
    return replace(task, seconds=whole, utilisation=min(max(busy_seconds / whole, 0.0), 1.0), fusable=False)


def fit(pairs: Sequence[Pair], shares: Sequence[float] = SHARES) -> Fit:
    """The share and the contention that explain ``pairs`` best; the model's defaults if there are none."""
    if not pairs:
        return Fit(Interference().contention, math.nan, 0)
    steps = [round(place * STEP, 3) for place in range(int(MOST / STEP) + 1)]
    tried = [Fit(contention, math.nan, len(pairs), share) for share in shares for contention in steps]
    best = min(tried, key=lambda one: sum(log * log for pair in pairs for log in _logs(pair, one)))
    errors = [abs(math.expm1(log)) for pair in pairs for log in _logs(pair, best)]
    return replace(best, error=sum(errors) / len(errors))


def calibrated(tasks: Sequence[QueuedTask], fitted: Fit) -> list[QueuedTask]:
    """``tasks`` as measured alone, each with the part of the device that it keeps busy."""
    return [replace(task, utilisation=task.utilisation * fitted.share) for task in tasks]


def _logs(pair: Pair, fitted: Fit) -> list[float]:
    simulated = together(calibrated(pair.tasks, fitted), fitted.contention, pair.background)
    predicted = {run.id: run.end for run in simulated.tasks}
    return [math.log(predicted[name] / seconds) for name, seconds in pair.together.items() if seconds > 0]


def together(tasks: Sequence[QueuedTask], contention: float, background: float = 0.0) -> Simulation:
    """``tasks`` side by side, all started at once."""
    device = DeviceState("device", 1 << 62, workers=len(tasks))
    return simulate(MPSNoAdmission(), tasks, [device], conditions(contention, background))


def conditions(contention: float, background: float = 0.0) -> Conditions:
    """The simulator's conditions with a fitted constant; starts are part of the measured seconds.

    Nothing pages: a budget below what the device has is kept by admission alone.
    """
    return Conditions(Interference(contention=contention, paging=1.0), background=background)
