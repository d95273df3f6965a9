"""Metrics on the device: static shapes, no host round trip, higher is better unless stated.

Shapes: M evaluated nodes, C classes or labels; a leading ``...`` is for tasks that share a step.
``logits [..., M, C]``; ``target`` is ``[M]`` int64 (one class each) or ``[M, C]`` 0/1 (many labels).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.runtime.loop.losses import errors

Metric = Callable[[Tensor, Tensor], Tensor]


def one_hot(target: Tensor, classes: int) -> Tensor:
    """``target`` as a bool matrix ``[M, C]``."""
    if target.dim() == 2:
        return target > 0.5
    return target[:, None] == torch.arange(classes, device=target.device)


def predicted(logits: Tensor, target: Tensor) -> Tensor:
    """The predictions of the logits as a bool matrix ``[..., M, C]``."""
    if target.dim() == 2:
        return logits > 0
    best = logits.argmax(-1, keepdim=True)
    return best == torch.arange(logits.shape[-1], device=logits.device)


def correct(logits: Tensor, target: Tensor) -> Tensor:
    """Correctness per node ``[..., M]`` float32: 0 or 1, or the share of its labels that are right."""
    if target.dim() == 2:
        return ((logits > 0) == (target > 0.5)).float().mean(-1)
    return (logits.argmax(-1) == target).float()


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    """The share of nodes (or, with many labels each, of node-label pairs) that are right ``[...]``."""
    return correct(logits, target).mean(-1)


def _counts(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Per class: true positives, and false positives plus false negatives ``[..., C]`` int64."""
    truth, guess = one_hot(target, logits.shape[-1]), predicted(logits, target)
    return (truth & guess).sum(-2), (truth ^ guess).sum(-2)


def f1_micro(logits: Tensor, target: Tensor) -> Tensor:
    """F1 of all classes pooled: ``2 TP / (2 TP + FP + FN)`` ``[...]``."""
    hits, misses = (count.sum(-1).double() for count in _counts(logits, target))
    return (2 * hits / (2 * hits + misses).clamp(min=1)).float()


def f1_macro(logits: Tensor, target: Tensor) -> Tensor:
    """The mean F1 of the classes that occur, in truth or in prediction; of many labels, of all of them ``[...]``.

    A label that neither occurs nor is predicted counts as 0, as in scikit-learn's ``f1_score(average="macro")``.
    """
    hits, misses = (count.double() for count in _counts(logits, target))
    support = 2 * hits + misses
    score = 2 * hits / support.clamp(min=1)
    if target.dim() == 2:
        return score.mean(-1).float()
    return (score.sum(-1) / (support > 0).sum(-1).clamp(min=1)).float()


def roc_auc(logits: Tensor, target: Tensor) -> Tensor:
    """Mean area under the ROC curve, one label against the rest ``[...]``; NaN where none has both classes.

    The area is the chance that a positive outranks a negative (a tie counts half), from the mean rank of the
    positives. Labels with one class only are left out of the mean.
    """
    scores = (logits if target.dim() == 2 else logits.softmax(-1)).transpose(-1, -2).contiguous()
    positive = one_hot(target, logits.shape[-1]).transpose(-1, -2).double()
    ordered = scores.sort(-1).values
    below = torch.searchsorted(ordered, scores)
    upto = torch.searchsorted(ordered, scores, right=True)
    rank = (below + upto + 1).double() / 2
    ones = positive.sum(-1)
    pairs = ones * (positive.shape[-1] - ones)
    area = ((rank * positive).sum(-1) - ones * (ones + 1) / 2) / pairs.clamp(min=1)
    usable = (pairs > 0).double()
    return ((area * usable).sum(-1) / usable.sum(-1)).float()


def mse(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error ``[...]`` of ``output [..., M, D]`` for numbers ``target [M, D]``, or ``[M]`` if D is 1.

    Less is better.
    """
    return errors(output, target).square().mean((-2, -1))


def mae(output: Tensor, target: Tensor) -> Tensor:
    """The mean absolute error ``[...]``; less is better."""
    return errors(output, target).abs().mean((-2, -1))


def r2(output: Tensor, target: Tensor) -> Tensor:
    """The share of the targets' variance that is explained ``[...]``: of several numbers per node, the mean of theirs.

    Numbers that are equal for all nodes are left out of the mean; NaN where all of them are.
    """
    rest = errors(output, target).double().square().sum(-2)
    numbers = target.double().reshape(target.shape[0], -1)
    spread = (numbers - numbers.mean(0)).square().sum(0)
    share = torch.where(spread > 0, 1.0 - rest / spread, 0.0)
    return (share.sum(-1) / (spread > 0).sum()).float()


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "f1_micro": f1_micro,
    "f1_macro": f1_macro,
    "roc_auc": roc_auc,
    "mse": mse,
    "mae": mae,
    "r2": r2,
}
