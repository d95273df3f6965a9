"""Losses that Weft knows by name besides plain cross-entropy: with class weights, and of regression.

Shapes: T members, N nodes, M rows, C classes, D numbers to predict; ``logits [..., N, C]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.core.errors import SpecError
from weft.core.task import Task

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
PerRow = Callable[[Tensor, Tensor], Tensor]


def class_weights_of(
    tasks: Sequence[Task], labels: Tensor, train: Tensor, classes: int, device: torch.device
) -> Tensor:
    """The weights of every member ``[T, C]``; ``"balanced"``: inverse to how often a class is among ``train``."""
    return torch.stack([_weights(task, labels, train, classes, device) for task in tasks])


def _weights(task: Task, labels: Tensor, train: Tensor, classes: int, device: torch.device) -> Tensor:
    if isinstance(task.class_weights, tuple):
        if len(task.class_weights) != classes:
            raise SpecError(
                f"task {task.label!r}: class_weights has {len(task.class_weights)} numbers for {classes} classes of "
                f"graph {task.graph_name!r}; give one per class"
            )
        return torch.tensor(task.class_weights, device=device)
    if labels.is_meta:
        return torch.ones(classes, device=device)
    counts = torch.bincount(labels.index_select(0, train.to(labels.device)), minlength=classes).to(device)
    return torch.where(counts > 0, counts.sum() / (classes * counts.clamp(min=1)), 0.0).float()


def weighted_cross_entropy(weights: Tensor, smoothing: Tensor | None) -> Loss:
    """``F.cross_entropy(logits[rows], labels[rows], weight, label_smoothing=...)`` of every member.

    ``weights [T, C]``, ``smoothing [T]``: a weighted mean over rows, by the weights of their classes.
    """

    def loss(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        log_p, target = logits.index_select(-2, rows).float().log_softmax(-1), labels.index_select(0, rows)
        of_rows = weights.index_select(-1, target)  # [T, M]
        right = log_p.gather(-1, target.expand(log_p.shape[:-1])[..., None]).squeeze(-1)
        total, found = of_rows.sum(-1), -(of_rows * right).sum(-1)
        if smoothing is None:
            return found / total
        uniform = -(log_p * weights[:, None]).sum((-2, -1)) / log_p.shape[-1]
        return ((1 - smoothing) * found + smoothing * uniform) / total

    return loss


def errors(output: Tensor, target: Tensor) -> Tensor:
    """What every number is off by ``[..., M, D]``, for ``output [..., M, D]``, ``target [M, D]`` or ``[M]``."""
    return output - (target[:, None] if target.dim() == 1 else target)


def squared_rows(logits: Tensor, target: Tensor) -> Tensor:
    """The squared error of every row, a mean over its numbers ``[..., M]``."""
    return errors(logits, target).square().mean(-1)


def absolute_rows(logits: Tensor, target: Tensor) -> Tensor:
    """The absolute error of every row, a mean over its numbers."""
    return errors(logits, target).abs().mean(-1)


def huber_rows(delta: Tensor) -> PerRow:
    """Huber's loss of every row; ``delta [T]``: half the square below it, a straight line above."""

    def rows(logits: Tensor, target: Tensor) -> Tensor:
        error, width = errors(logits, target).abs(), delta[:, None, None]
        return torch.where(error < width, 0.5 * error.square(), width * (error - 0.5 * width)).mean(-1)

    return rows


def regression_rows(name: str, tasks: Sequence[Task], device: torch.device) -> PerRow:
    """The error of every row by the name of an objective."""
    if name == "huber":
        return huber_rows(torch.tensor([task.huber_delta for task in tasks], device=device))
    return squared_rows if name == "mse" else absolute_rows


def mean_of_rows(per_row: PerRow) -> Loss:
    """The mean over the rows of a batch."""

    def loss(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        return per_row(logits.index_select(-2, rows).float(), labels.index_select(0, rows)).mean(-1)

    return loss
