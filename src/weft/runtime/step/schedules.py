"""Learning-rate schedules, computed for every step before the first one.

The step looks its rate up by its own counter, so that a replayed step needs nothing from the host.
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

# ---- The rates of a schedule of the user's own, for all epochs before the first: a function of the epoch, or torch's.
#
# A scheduler of ``torch.optim.lr_scheduler`` is stepped beside an optimizer that trains nothing, and its rates are
# noted.

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
    "plateau": constant,  # what lowers it is in the state: weft.runtime.step.schedules
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


# ---- Plateau: lower a member's rate when a column of its history stops improving, by comparisons on the device.
#
# The rule is that of torch's ``ReduceLROnPlateau`` (relative threshold), called after every evaluation of the member.
# Shapes: T members, M columns of history.

LEAST_CHANGE = 1e-8  # of a rate; torch's eps
RATE = "rate"  # what the rates of a table are multiplied by, [T]


def initial(tasks: Sequence[Task], device: torch.device) -> dict[str, Tensor]:
    """The state before the first epoch: the best value so far, evaluations without a better one, and cooling down."""
    best = [torch.inf if lower_is_better(_watch(task)) else -torch.inf for task in tasks]
    zeros = torch.zeros(len(tasks), dtype=torch.int64, device=device)
    return {
        "plateau_best": torch.tensor(best, dtype=torch.float64, device=device),
        "plateau_bad": zeros,
        "plateau_cooldown": zeros.clone(),
    }


def _watch(task: Task) -> str:
    return str(task.plateau.get("watch", PLATEAU["watch"]))


class Plateau:
    """The rules of ``tasks`` for rows with ``columns``; ``rates``: the learning rate each begins with."""

    def __init__(
        self, tasks: Sequence[Task], columns: Sequence[str], rates: Sequence[float], device: torch.device
    ) -> None:
        for task in tasks:
            _check(task, columns)
        settings = [PLATEAU | task.plateau for task in tasks]

        def numbers(name: str) -> Tensor:
            return torch.tensor([float(one[name]) for one in settings], dtype=torch.float64, device=device)

        self._factor, self._threshold, self._patience = numbers("factor"), numbers("threshold"), numbers("patience")
        self._cooldown = numbers("cooldown").long()
        self._rates = torch.tensor(list(rates), dtype=torch.float64, device=device)
        self._least = numbers("min_lr") / self._rates
        self._column = torch.tensor([columns.index(_watch(task)) for task in tasks], device=device)[:, None]
        self._lower = torch.tensor([lower_is_better(_watch(task)) for task in tasks], device=device)
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
        bad, left = torch.where(cooling > 0, 0, bad), torch.where(cooling > 0, cooling - 1, cooling)
        lower = bad > self._patience
        rate = state[RATE]
        reduced = torch.maximum(rate * self._factor, self._least)
        changes = lower & (self._rates * (rate - reduced) > LEAST_CHANGE)
        _put(state, "plateau_best", torch.where(better, value, best), due)
        _put(state, "plateau_bad", torch.where(lower, 0, bad), due)
        _put(state, "plateau_cooldown", torch.where(lower, self._cooldown, left), due)
        _put(state, RATE, torch.where(changes, reduced, rate), due)


def _put(state: dict[str, Tensor], name: str, value: Tensor, due: Tensor) -> None:
    state[name].copy_(torch.where(due, value, state[name]))


def _check(task: Task, columns: Sequence[str]) -> None:
    if _watch(task) not in columns:
        raise SpecError(
            f"task {task.label!r}: plateau watches {_watch(task)!r}, which is not measured; set its watch "
            f"to one of {', '.join(columns)}"
        )
    if task.plateau.get("min_lr") and any("lr" in group for group in task.param_groups.values()):
        raise SpecError(
            f"task {task.label!r}: plateau: min_lr does not go with a lr per group in param_groups: "
            "one factor serves all groups"
        )
