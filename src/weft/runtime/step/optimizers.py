"""Adam, AdamW and SGD on flat buffers, with every number in a table on the device.

``hyper [8]`` is one row of the table: lr, beta1 (SGD: momentum), beta2, eps, weight_decay, decoupled,
and Adam's two bias corrections ``1 - beta^t``. The step looks its rows up by its own counter.
Shapes: T members, P parameters.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from weft import ops
from weft.core.task import Task
from weft.runtime.step.parameters import Layout
from weft.runtime.step.schedules import learning_rates

SPARE = 4  # rows beyond the last step, for the warm-up of a capture that begins there


def hyper_table(task: Task, steps_per_epoch: int = 1) -> Tensor:
    """The numbers of every step ``[epochs * steps_per_epoch, 8]``, computed in double precision."""
    beta1, beta2 = task.betas
    if task.optimizer == "sgd":
        beta1, beta2 = task.momentum, 0.0
    rates = learning_rates(task, steps_per_epoch)
    fixed = [beta1, beta2, task.eps, task.weight_decay, 1.0 if task.optimizer == "adamw" else 0.0]
    corrections = ([1 - beta ** (t + 1) for t in range(len(rates))] for beta in (beta1, beta2))
    # Column by column: a tensor of rows takes seconds for the steps of a long sampled run.
    table = torch.empty(len(rates), 8, dtype=torch.float32)
    table[:, 1:6] = torch.tensor(fixed, dtype=torch.float64)
    for column, numbers in zip((0, 6, 7), (rates, *corrections), strict=True):
        table[:, column] = torch.tensor(array("d", numbers), dtype=torch.float64)
    return table


def sgd_(param: Tensor, grad: Tensor, velocity: Tensor, hyper: Tensor, decay_mask: Tensor | None = None) -> None:
    """One SGD step in place on ``[..., P]``: ``v = momentum v + g + decay w``, ``w -= lr v``."""
    lr, momentum, decay = (hyper[..., column, None] for column in (0, 1, 4))
    if decay_mask is not None:
        decay = decay * decay_mask
    velocity.mul_(momentum).add_(grad).addcmul_(param, decay)
    param.sub_(velocity * lr)


def stacked_table(tasks: Sequence[Task], length: int, steps_per_epoch: int = 1) -> Tensor:
    """The tables of ``tasks`` side by side ``[T, length * steps_per_epoch + SPARE, 8]``; ``length`` counts epochs.

    A member whose epochs are over has a rate of 0 (and corrections of 1, to divide by): its weights stay.
    """
    still = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    table = still.expand(len(tasks), length * steps_per_epoch + SPARE, 8).clone()
    for row, task in zip(table, tasks, strict=True):
        row[: task.epochs * steps_per_epoch] = hyper_table(task, steps_per_epoch)
    return table


class Optimizer:
    """The update of the flat buffers of T members in one call; all of them SGD, or all Adam or AdamW."""

    def __init__(
        self, tasks: Sequence[Task], layout: Layout, length: int, device: torch.device, steps_per_epoch: int = 1
    ) -> None:
        self._sgd = tasks[0].optimizer == "sgd"
        self.moments = 1 if self._sgd else 2
        self._table = stacked_table(tasks, length, steps_per_epoch).to(device)
        mask = layout.decay_mask() if any(task.weight_decay for task in tasks) else None
        self._mask = None if mask is None else mask.to(device)

    def update(self, flat: Tensor, grad: Tensor, moments: tuple[Tensor, ...], step: Tensor) -> None:
        """Apply ``grad [T, P]`` to ``flat [T, P]`` in place; ``step [1]`` int64 picks the rows of the table."""
        hyper = self._table.index_select(1, step).squeeze(1)
        apply = sgd_ if self._sgd else ops.adam_
        apply(flat, grad, *moments, hyper, self._mask)
