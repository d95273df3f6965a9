"""Which steps update the weights, and what happens to a gradient before: accumulation, clipping, averaging.

Everything is a comparison or a table on the device, so that one captured step serves all epochs and members.
Shapes: T members, P parameters, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.task import Task


def is_update(task: Task, step: int, steps_per_epoch: int) -> bool:
    """Whether the weights are updated in ``step`` (counted from 0).

    With ``accumulate=k``, after every k-th step of an epoch and after its last; where an epoch is one step, after
    every k-th epoch.
    """
    place = step if steps_per_epoch == 1 else step % steps_per_epoch
    return (place + 1) % task.accumulate == 0 or (steps_per_epoch > 1 and place + 1 == steps_per_epoch)


def update_counts(task: Task, steps_per_epoch: int) -> list[int]:
    """After every step of the training, how many updates there were so far."""
    if task.accumulate == 1:
        return list(range(1, task.epochs * steps_per_epoch + 1))
    total, found = 0, []
    for step in range(task.epochs * steps_per_epoch):
        total += is_update(task, step, steps_per_epoch)
        found.append(total)
    return found


class Accumulation:
    """Adds up gradients over the steps of an update: their sum divided by ``accumulate``, as of ``loss / k``."""

    def __init__(
        self, tasks: Sequence[Task], length: int, steps_per_epoch: int, spare: int, device: torch.device
    ) -> None:
        self._parts = torch.tensor([1.0 / task.accumulate for task in tasks], device=device)[:, None]
        due = torch.zeros(len(tasks), length * steps_per_epoch + spare, dtype=torch.bool)
        for row, task in zip(due, tasks, strict=True):
            steps = range(task.epochs * steps_per_epoch)
            row[: len(steps)] = torch.tensor([is_update(task, step, steps_per_epoch) for step in steps])
        self._due = due.to(device)

    def due(self, step: Tensor) -> Tensor:
        """Which members are updated in ``step [1]``: ``[T, 1]`` bool."""
        return self._due.index_select(1, step)

    def add(self, sums: Tensor, grad: Tensor) -> Tensor:
        """Add a step's gradient ``[T, P]`` to the ``sums`` so far; gives a copy of these."""
        return sums.add_(grad * self._parts).clone()


class Clipping:
    """Bounds the gradient of every member: its norm, or each of its numbers."""

    def __init__(self, tasks: Sequence[Task], device: torch.device) -> None:
        self._by_norm = tasks[0].clip_norm is not None
        limits = [task.clip_norm if self._by_norm else task.clip_value for task in tasks]
        self._limits = torch.tensor(limits, device=device)[:, None]

    def __call__(self, grad: Tensor) -> Tensor:
        """The clipped gradient ``[T, P]``, as ``clip_grad_norm_`` or ``clip_grad_value_`` give it."""
        if not self._by_norm:
            return torch.maximum(torch.minimum(grad, self._limits), -self._limits)
        norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=True)
        return grad * (self._limits / (norm + 1e-6)).clamp(max=1.0)


class Averaging:
    """The exponential moving average of the weights, as ``torch.optim.swa_utils.get_ema_multi_avg_fn`` has it.

    The first update copies the weights; every later one moves the average by ``1 - decay`` of the way to them.
    """

    def __init__(
        self, tasks: Sequence[Task], length: int, steps_per_epoch: int, spare: int, device: torch.device
    ) -> None:
        shares = torch.zeros(len(tasks), length * steps_per_epoch + spare)
        for row, task in zip(shares, tasks, strict=True):
            own = _average_shares(task, steps_per_epoch)
            row[: len(own)] = torch.tensor(own)
        self._shares = shares.to(device)

    def __call__(self, average: Tensor, flat: Tensor, step: Tensor) -> None:
        """Take the weights ``flat [T, P]`` after ``step [1]`` into ``average``."""
        average.lerp_(flat, self._shares.index_select(1, step).expand_as(flat))


def _average_shares(task: Task, steps_per_epoch: int) -> list[float]:
    """How far the average moves in every step: all the way at the first update, not at all between updates."""
    counts = update_counts(task, steps_per_epoch)
    pairs = zip([0, *counts], counts, strict=False)
    return [0.0 if now == before else 1.0 if before == 0 else 1.0 - (task.ema or 0.0) for before, now in pairs]
