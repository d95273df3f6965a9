"""Learning-rate schedules, computed for every step before the first one.

The step looks its rate up by its own counter, so that a replayed step needs nothing from the host. A schedule may be a
user's own function of the epoch, or one of ``torch.optim.lr_scheduler``, which is stepped with an optimizer that trains
nothing.

Shapes: T members, M columns of history.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.compatibility import function_name
from weft.core.errors import SpecError
from weft.core.settings import PLATEAU, lower_is_better
from weft.core.task import Task
from weft.runtime.modules.settings import in_words
from weft.runtime.step.losses import function_of

HINT = "; a function that makes a scheduler has a parameter called optimizer, any other is called with the epoch"
LEAST_CHANGE = 1e-8  # of a rate; torch's eps
RATE = "rate"  # what the rates of a table are multiplied by, [T]

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "cosine": lambda t: 0.5 * (1.0 + math.cos(math.pi * t)),  # half a cosine from 1 down to 0
    "linear": lambda t: 1.0 - t,
    "step": lambda t: 1.0 if t < 0.5 else 0.1 if t < 0.75 else 0.01,  # at half and three quarters of the training
    "plateau": lambda t: 1.0,  # what lowers it is in the state (Plateau)
}


def first_parameter(function: Callable[..., Any]) -> str | None:
    """The name of the first parameter of ``function``; None if it has none, or if that cannot be read."""
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):
        return None


def own_factors(task: Task) -> list[float]:
    """The factor of ``lr`` for every epoch, counted from 0, of a schedule of the user's own."""
    schedule, name = function_of(task, "schedule"), function_name(task.schedule)
    makes_scheduler = first_parameter(schedule) == "optimizer"
    try:
        if not makes_scheduler:
            factors = [schedule(epoch) for epoch in range(task.epochs)]
        elif task.has_own("optimizer") and "lr" not in task.given:
            raise SpecError(f"task {task.label!r}: schedule {name} needs lr= of the task to begin with")
        else:
            factors = [rate / task.lr for rate in _scheduler_rates(task, schedule, task.lr)]
    except SpecError:
        raise
    except Exception as error:
        expects_optimizer = "ptimizer" in str(error) or "'int' object" in str(error)
        hint = HINT if isinstance(error, (TypeError, AttributeError)) and expects_optimizer else ""
        hint = "" if makes_scheduler else hint
        raise SpecError(f"task {task.label!r}: schedule {name} raised {in_words(error, __file__)}{hint}") from error
    numbers = [float(f) if isinstance(f, (int, float)) or hasattr(f, "item") else math.nan for f in factors]
    for epoch, number in enumerate(numbers):
        if not 0 <= number < math.inf:
            raise SpecError(
                f"task {task.label!r}: schedule {name}({epoch}) is {factors[epoch]!r}; expected a factor of lr, "
                "at least 0"
            )
    return numbers


def check_group_rates(task: Task, rates: Iterable[float]) -> None:
    """A :class:`SpecError` if a scheduler of torch's would not multiply ``rates``, which groups of parameters have.

    Some set rates of their own (``CyclicLR``, ``eta_min`` of cosines); here one factor serves all groups.
    """
    schedule = function_of(task, "schedule") if task.has_own("schedule") else None
    different = sorted({float(rate) for rate in rates} - {task.lr})
    if schedule is None or not different or first_parameter(schedule) != "optimizer":
        return
    factors = own_factors(task)
    for rate in different:
        pairs = zip(_scheduler_rates(task, schedule, rate), factors, strict=True)
        if any(abs(true - rate * factor) > 1e-6 * max(true, rate) for true, factor in pairs):
            raise SpecError(
                f"task {task.label!r}: schedule {function_name(task.schedule)} does not multiply every rate by the "
                f"same factor, and a group of parameters has lr={rate:g} beside the task's lr={task.lr:g}; give groups "
                "the same lr, or a schedule that is a function of the epoch"
            )


def _scheduler_rates(task: Task, make: Callable[..., Any], first: float) -> list[float]:
    """The rates of all epochs that a scheduler of torch's sets, for a group that begins with ``first``."""
    start = f"task {task.label!r}: schedule {function_name(task.schedule)}"
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=first, momentum=0.5)
    (group,) = optimizer.param_groups
    before = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
    scheduler, rates = make(optimizer), []
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or not hasattr(scheduler, "step"):
        raise SpecError(f"{start} gave {type(scheduler).__name__}, not a scheduler that needs the epoch alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps beyond its last
        for _ in range(task.epochs):
            rates.append(float(group["lr"]))
            changed = [key for key, value in before.items() if group[key] != value]
            if changed:
                raise SpecError(f"{start} changes more than the learning rate: {', '.join(changed)}")
            optimizer.step()
            scheduler.step()
    return rates


def rate_factors(task: Task, steps_per_epoch: int = 1) -> list[float]:
    """The rate of every step as a factor of what it begins with."""
    if task.has_own("schedule"):
        return [factor for factor in own_factors(task) for _ in range(steps_per_epoch)]
    return [rate / task.lr for rate in learning_rates(task, steps_per_epoch)]


def learning_rates(task: Task, steps_per_epoch: int = 1) -> list[float]:
    """The rate of every step: ``warmup`` epochs rising to ``lr``, then the schedule over the rest."""
    if task.has_own("schedule"):
        return [task.lr * factor for factor in own_factors(task) for _ in range(steps_per_epoch)]
    warmup, rest = task.warmup * steps_per_epoch, (task.epochs - task.warmup) * steps_per_epoch
    rising = [task.lr * (step + 1) / warmup for step in range(warmup)]
    if task.schedule in ("constant", "plateau"):
        return rising + [task.lr] * rest
    factor = SCHEDULES[task.schedule]
    return rising + [task.lr * factor(step / rest) for step in range(rest)]


def plateau_state(tasks: Sequence[Task], device: torch.device) -> dict[str, Tensor]:
    """The state before the first epoch: the best value so far, evaluations without a better one, and cooling down."""
    watched = [str((PLATEAU | task.plateau)["watch"]) for task in tasks]
    best = [torch.inf if lower_is_better(column) else -torch.inf for column in watched]
    zeros = torch.zeros(len(tasks), dtype=torch.int64, device=device)
    return {
        "plateau_best": torch.tensor(best, dtype=torch.float64, device=device),
        "plateau_bad": zeros,
        "plateau_cooldown": zeros.clone(),
    }


class Plateau:
    """Lower a member's rate when a column of its history stops improving, by comparisons on the device.

    The rule is that of torch's ``ReduceLROnPlateau`` (relative threshold), applied after every evaluation of the
    member. ``columns`` are those of a row; ``rates``: the learning rate that each task begins with.
    """

    def __init__(
        self, tasks: Sequence[Task], columns: Sequence[str], rates: Sequence[float], device: torch.device
    ) -> None:
        settings = [PLATEAU | task.plateau for task in tasks]
        watched = [str(setting["watch"]) for setting in settings]
        for task, column in zip(tasks, watched, strict=True):
            if column not in columns:
                raise SpecError(
                    f"task {task.label!r}: plateau watches {column!r}, which is not measured; set its watch "
                    f"to one of {', '.join(columns)}"
                )
            if task.plateau.get("min_lr") and any("lr" in group for group in task.param_groups.values()):
                raise SpecError(
                    f"task {task.label!r}: plateau: min_lr does not go with a lr per group in param_groups: "
                    "one factor serves all groups"
                )
        names = ("factor", "threshold", "patience", "cooldown", "min_lr")
        rows = [[float(setting[name]) for setting in settings] for name in names]
        numbers = torch.tensor(rows, dtype=torch.float64, device=device)
        self._factor, self._threshold, self._patience, cooldown, least = numbers.unbind(0)
        self._cooldown = cooldown.long()
        self._rates = torch.tensor(list(rates), dtype=torch.float64, device=device)
        self._least = least / self._rates
        self._column = torch.tensor([columns.index(column) for column in watched], device=device)[:, None]
        self._lower = torch.tensor([lower_is_better(column) for column in watched], device=device)
        self._every = torch.tensor([task.eval_every for task in tasks], device=device)
        self._epochs = torch.tensor([task.epochs for task in tasks], device=device)

    def __call__(self, state: dict[str, Tensor], rows: Tensor, epoch: Tensor) -> None:
        """After an evaluation ``rows [T, M]`` at the end of ``epoch [T]``, counted from 0."""
        due = ((epoch + 1) % self._every == 0) | (epoch + 1 == self._epochs)
        value, best = rows.gather(1, self._column).squeeze(1).double(), state["plateau_best"]
        bound = best * torch.where(self._lower, 1.0 - self._threshold, 1.0 + self._threshold)
        better = torch.where(self._lower, value < bound, value > bound)
        bad = torch.where(better, 0, state["plateau_bad"] + 1)
        cooling = state["plateau_cooldown"]
        bad, remaining = torch.where(cooling > 0, 0, bad), torch.where(cooling > 0, cooling - 1, cooling)
        lower = bad > self._patience
        rate = state[RATE]
        reduced = torch.maximum(rate * self._factor, self._least)
        changes = lower & (self._rates * (rate - reduced) > LEAST_CHANGE)
        new = {
            "plateau_best": torch.where(better, value, best),
            "plateau_bad": torch.where(lower, 0, bad),
            "plateau_cooldown": torch.where(lower, self._cooldown, remaining),
            RATE: torch.where(changes, reduced, rate),
        }
        for name, values in new.items():
            state[name].copy_(torch.where(due, values, state[name]))
