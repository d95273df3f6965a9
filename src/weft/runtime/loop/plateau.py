"""Plateau: lower a member's rate when a column of its history stops improving, by comparisons on the device.

The rule is that of torch's ``ReduceLROnPlateau`` (relative threshold), called after every evaluation of the member.
Shapes: T members, M columns of history.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.errors import SpecError
from weft.core.settings.loop_settings import PLATEAU, lower_is_better
from weft.core.task import Task

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
