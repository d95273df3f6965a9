"""Rates and decays per parameter, from ``param_groups``: Adam, AdamW and SGD with a number per element of the weights.

Shapes: T members, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import SpecError
from weft.core.settings.loop_settings import group_of
from weft.core.task import Task
from weft.runtime.loop.own_schedule import check_group_rates


def check_patterns(task: Task, names: Sequence[str]) -> None:
    """A :class:`SpecError` for a pattern that no parameter of the model is in."""
    found = {group_of(name, task.param_groups) for name in names}
    for pattern in task.param_groups:
        if pattern not in found:
            raise SpecError(
                f"task {task.label!r}: param_groups[{pattern!r}] is the group of no parameter of {task.model_name}; "
                f"they are called {', '.join(names)}, and the first pattern that matches counts"
            )


@dataclass(frozen=True)
class GroupRates:
    """``scales [T, P]`` of the learning rate, ``decays [T, P]`` of the weights."""

    scales: Tensor
    decays: Tensor

    @classmethod
    def of(cls, tasks: Sequence[Task], names: Sequence[str], sizes: Sequence[int], mask: Tensor | None) -> GroupRates:
        """Of parameters with ``names`` and ``sizes``; ``mask [P]``: where the tasks' own weight decay applies."""
        for task in tasks:
            check_patterns(task, names)
            check_group_rates(task, [group["lr"] for group in task.param_groups.values() if "lr" in group])
        scales, decays = [], []
        for task in tasks:
            groups = [task.param_groups.get(group_of(name, task.param_groups) or "", {}) for name in names]
            scales.append([float(group.get("lr", task.lr)) / task.lr for group in groups])
            decays.append([float(group.get("weight_decay", task.weight_decay)) for group in groups])
        repeats = torch.tensor(list(sizes))
        wide = [
            torch.tensor(rows, dtype=torch.float64).float().repeat_interleave(repeats, 1) for rows in (scales, decays)
        ]
        return cls(wide[0], wide[1] if mask is None else wide[1] * mask)

    def to(self, device: torch.device) -> GroupRates:
        """The same on another device."""
        return GroupRates(self.scales.to(device), self.decays.to(device))


def adam_groups_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Tensor, groups: GroupRates
) -> None:
    """One Adam or AdamW step in place on ``[T, P]``; ``hyper [T, 10]`` as :func:`weft.ops.adam_` has it."""
    lr, _, beta2, eps, _, decoupled, correction1, correction2, rest1, rest2 = (
        column[:, None] for column in hyper.unbind(-1)
    )
    lr = lr * groups.scales
    param.mul_(1.0 - lr * groups.decays * decoupled)
    grad = grad + groups.decays * (1.0 - decoupled) * param
    exp_avg.lerp_(grad, rest1.expand_as(grad))
    exp_avg_sq.mul_(beta2).add_(rest2 * grad * grad)
    denominator = (exp_avg_sq / correction2).sqrt_().add_(eps)
    param.sub_(lr / correction1 * exp_avg / denominator)


def sgd_groups_(param: Tensor, grad: Tensor, velocity: Tensor, hyper: Tensor, groups: GroupRates) -> None:
    """One SGD step in place on ``[T, P]``."""
    lr, momentum = (hyper[:, column, None] for column in (0, 1))
    velocity.mul_(momentum).add_(grad).addcmul_(param, groups.decays)
    param.sub_(velocity * (lr * groups.scales))
