"""The rates of a schedule of the user's own, for all epochs before the first: a function of the epoch, or torch's.

A scheduler of ``torch.optim.lr_scheduler`` is stepped beside an optimizer that trains nothing, and its rates are noted.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.core.compatibility import function_name
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.runtime.loop.functions import function_of
from weft.runtime.user_modules.importing import in_words


def own_factors(task: Task) -> list[float]:
    """The factor of ``lr`` for every epoch, counted from 0."""
    schedule = function_of(task, "schedule")
    try:
        found = _stepped(task, schedule) if _makes_scheduler(schedule) else [schedule(e) for e in range(task.epochs)]
    except SpecError:
        raise
    except Exception as error:
        words = in_words(error, __file__)
        raise SpecError(f"task {task.label!r}: schedule {_name(task)} raised {words}") from error
    return [_checked(task, epoch, value) for epoch, value in enumerate(found)]


def _makes_scheduler(schedule: Callable[..., Any]) -> bool:
    """Whether it is a scheduler of torch's, or a function that makes one: its first parameter is ``optimizer``."""
    try:
        names = list(inspect.signature(schedule).parameters)
    except (TypeError, ValueError):
        return False
    return names[:1] == ["optimizer"]


def _stepped(task: Task, make: Callable[..., Any]) -> list[float]:
    """What a scheduler of torch's sets as the rate in every epoch, as factors of the first."""
    if task.has_own("optimizer") and "lr" not in task.given:
        raise SpecError(f"task {task.label!r}: schedule {_name(task)} needs lr= of the task to begin with")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=task.lr, momentum=0.5)
    (group,) = optimizer.param_groups
    before = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
    scheduler, rates = make(optimizer), []
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or not hasattr(scheduler, "step"):
        what = type(scheduler).__name__
        raise SpecError(
            f"task {task.label!r}: schedule {_name(task)} gave {what}, not a scheduler that needs the epoch alone"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps beyond its last
        for _ in range(task.epochs):
            rates.append(float(group["lr"]) / task.lr)
            if any(group[key] != value for key, value in before.items()):
                raise SpecError(f"task {task.label!r}: schedule {_name(task)} changes more than the learning rate")
            optimizer.step()
            scheduler.step()
    return rates


def _checked(task: Task, epoch: int, value: Any) -> float:
    number = float(value) if isinstance(value, (int, float)) or hasattr(value, "item") else math.nan
    if not 0 <= number < math.inf:
        raise SpecError(
            f"task {task.label!r}: schedule {_name(task)}({epoch}) is {value!r}; expected a factor of lr, at least 0"
        )
    return number


def _name(task: Task) -> str:
    return function_name(task.schedule)
