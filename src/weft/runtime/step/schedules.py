"""Learning-rate schedules, computed for every step before the first one.

The step looks its rate up by its own counter, so that a replayed step needs nothing from the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.core.task import Task
from weft.runtime.loop.own_schedule import own_factors


def constant(t: float) -> float:
    """Always the full rate."""
    return 1.0


def cosine(t: float) -> float:
    """Half a cosine from 1 down to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * t))


def linear(t: float) -> float:
    """A straight line from 1 down to 0."""
    return 1.0 - t


def step(t: float) -> float:
    """A tenth from half of the training on, a hundredth from three quarters on."""
    return 1.0 if t < 0.5 else 0.1 if t < 0.75 else 0.01


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "step": step,
    "plateau": constant,  # what lowers it is in the state: weft.runtime.loop.plateau
}


def rate_factors(task: Task, steps_per_epoch: int = 1) -> list[float]:
    """The rate of every step as a factor of what it begins with."""
    if task.has_own("schedule"):
        return [factor for factor in own_factors(task) for _ in range(steps_per_epoch)]
    return [rate / task.lr for rate in learning_rates(task, steps_per_epoch)]


def learning_rates(task: Task, steps_per_epoch: int = 1) -> list[float]:
    """The rate of every step: ``warmup`` epochs rising to ``lr``, then the schedule over the rest."""
    if task.has_own("schedule"):
        return [task.lr * factor for factor in own_factors(task) for _ in range(steps_per_epoch)]
    factor = SCHEDULES[task.schedule]
    warmup, rest = task.warmup * steps_per_epoch, (task.epochs - task.warmup) * steps_per_epoch
    rising = [task.lr * (step + 1) / warmup for step in range(warmup)]
    if factor is constant:
        return rising + [task.lr] * rest
    return rising + [task.lr * factor(step / rest) for step in range(rest)]
