"""The rates of a schedule of the user's own, for all epochs before the first: a function of the epoch, or torch's.

A scheduler of ``torch.optim.lr_scheduler`` is stepped beside an optimizer that trains nothing, and its rates are noted.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from weft.core.compatibility import function_name
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.runtime.loop.functions import function_of
from weft.runtime.user_modules.importing import in_words

HINT = "; a function that makes a scheduler has a parameter called optimizer, any other is called with the epoch"


def own_factors(task: Task) -> list[float]:
    """The factor of ``lr`` for every epoch, counted from 0."""
    schedule = function_of(task, "schedule")
    try:
        found = _stepped(task, schedule) if _makes_scheduler(schedule) else [schedule(e) for e in range(task.epochs)]
    except SpecError:
        raise
    except Exception as error:
        words = in_words(error, __file__)
        hint = "" if _makes_scheduler(schedule) or not _wants_optimizer(error) else HINT
        raise SpecError(f"task {task.label!r}: schedule {_name(task)} raised {words}{hint}") from error
    return [_checked(task, epoch, value) for epoch, value in enumerate(found)]


def check_group_rates(task: Task, rates: Iterable[float]) -> None:
    """A :class:`SpecError` if a scheduler of torch's would not multiply ``rates``, which groups of parameters have.

    Some set rates of their own (``CyclicLR``, ``eta_min`` of cosines); here one factor serves all groups.
    """
    schedule = function_of(task, "schedule") if task.has_own("schedule") else None
    others = sorted({float(rate) for rate in rates} - {task.lr})
    if schedule is None or not others or not _makes_scheduler(schedule):
        return
    factors = own_factors(task)
    for rate in others:
        found = _rates(task, schedule, rate)
        if any(abs(one - rate * factor) > 1e-6 * max(one, rate) for one, factor in zip(found, factors, strict=True)):
            raise SpecError(
                f"task {task.label!r}: schedule {_name(task)} does not multiply every rate by the same factor, and a "
                f"group of parameters has lr={rate:g} beside the task's lr={task.lr:g}; give groups the same lr, or a "
                "schedule that is a function of the epoch"
            )


def _makes_scheduler(schedule: Callable[..., Any]) -> bool:
    """Whether it is a scheduler of torch's, or a function that makes one: its first parameter is ``optimizer``."""
    try:
        names = list(inspect.signature(schedule).parameters)
    except (TypeError, ValueError):
        return False
    return names[:1] == ["optimizer"]


def _wants_optimizer(error: Exception) -> bool:
    """Whether a function was called with an epoch where it expected an optimizer."""
    return isinstance(error, (TypeError, AttributeError)) and ("ptimizer" in str(error) or "'int' object" in str(error))


def _stepped(task: Task, make: Callable[..., Any]) -> list[float]:
    """What a scheduler of torch's sets as the rate in every epoch, as factors of the first."""
    if task.has_own("optimizer") and "lr" not in task.given:
        raise SpecError(f"task {task.label!r}: schedule {_name(task)} needs lr= of the task to begin with")
    return [rate / task.lr for rate in _rates(task, make, task.lr)]


def _rates(task: Task, make: Callable[..., Any], first: float) -> list[float]:
    """The rates of all epochs, of a group that begins with ``first``."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=first, momentum=0.5)
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
            rates.append(float(group["lr"]))
            changed = [key for key, value in before.items() if group[key] != value]
            if changed:
                what = ", ".join(changed)
                raise SpecError(
                    f"task {task.label!r}: schedule {_name(task)} changes more than the learning rate: {what}"
                )
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
