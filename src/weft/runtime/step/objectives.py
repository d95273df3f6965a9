"""Training objectives: cross-entropy, binary cross-entropy for many labels, regression losses, or a user's function.

Shapes: N nodes, M rows, C classes or labels; ``logits [..., N, C]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft import ops
from weft.core.compatibility import REGRESSIONS, objective_name
from weft.core.errors import SpecError
from weft.core.settings.loop_settings import LOWER
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.runtime.loop.functions import OwnMeasure
from weft.runtime.loop.losses import class_weights_of, mean_of_rows, regression_rows, weighted_cross_entropy


def multiclass_rows(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of every row ``[..., M]`` for ``logits [..., M, C]``, ``target [M]`` int64."""
    # Nodes last, so that a CPU's softmax runs along them: 5x quicker for Cora's 7 classes.
    log_p = logits.transpose(-1, -2).contiguous().log_softmax(-2)
    index = target.expand(*logits.shape[:-2], 1, -1)
    return log_p.gather(-2, index).squeeze(-2).neg()


def multilabel_rows(logits: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of every row, mean over its labels ``[..., M]``; ``target [M, C]`` 0/1."""
    target = target.expand(logits.shape)
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1)


@dataclass(frozen=True)
class Objective:
    """``loss(logits, labels, rows)`` to differentiate, and ``per_row(logits, target)`` to report.

    ``per_row`` is None for a loss that is no mean over rows: the loss of a split is then that of its rows. ``own``: it
    is a function of the user's own, which is given whatever the model returned.
    """

    name: str
    loss: Callable[[Any, Tensor, Tensor], Tensor]
    per_row: Callable[[Tensor, Tensor], Tensor] | None
    own: bool = False


def _multiclass(smoothing: Tensor | None) -> Objective:
    def smoothed(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        chosen = logits.index_select(-2, rows).float()
        uniform = torch.logsumexp(chosen, -1) - chosen.mean(-1)
        right = multiclass_rows(chosen, labels.index_select(0, rows))
        share = smoothing[..., None]
        return ((1 - share) * right + share * uniform).mean(-1)

    loss = ops.cross_entropy_rows if smoothing is None else smoothed
    return Objective("multiclass", loss, multiclass_rows)


def _multilabel() -> Objective:
    def loss(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        chosen = logits.index_select(-2, rows).float()
        return multilabel_rows(chosen, labels.index_select(0, rows)).mean(-1)

    return Objective("multilabel", loss, multilabel_rows)


def objective_of_stack(
    tasks: Sequence[Task], graph: Graph, device: torch.device, train: Tensor | None = None
) -> Objective:
    """The objective of tasks that share a step, each with its own numbers; ``logits [T, N, C]``, losses ``[T]``.

    ``train``: the nodes that they train on, the graph's unless given.
    """
    if tasks[0].has_own("objective"):
        own = OwnMeasure(tasks[0], "objective")
        return Objective(own.name, own, None, own=True)
    for task in tasks:
        _check(task, graph)
    if graph.regression:
        return _regression(tasks, device)
    if graph.multilabel:
        return _multilabel()
    numbers = [task.label_smoothing for task in tasks]
    smoothing = torch.tensor(numbers, device=device) if any(numbers) else None
    if tasks[0].class_weights is None:
        return _multiclass(smoothing)
    rows = graph.train if train is None else train
    weights = class_weights_of(tasks, graph.y, rows, graph.num_classes, device)
    return Objective("multiclass", weighted_cross_entropy(weights, smoothing), None)


def _regression(tasks: Sequence[Task], device: torch.device) -> Objective:
    name = objective_name(tasks[0], multilabel=False, regression=True)
    per_row = regression_rows(name, tasks, device)
    return Objective(name, mean_of_rows(per_row), per_row)


def _check(task: Task, graph: Graph) -> None:
    kind, expected = _suited(graph)
    name = objective_name(task, graph.multilabel, graph.regression)
    if name not in expected:
        raise SpecError(
            f"task {task.label!r}: objective={task.objective!r} does not suit graph {task.graph_name!r}, "
            f"which has {kind}; use {' or '.join(map(repr, expected))} or 'auto'"
        )
    if name != "multiclass" and task.label_smoothing:
        raise SpecError(
            f"task {task.label!r}: label_smoothing={task.label_smoothing:g} is for multiclass objectives; "
            f"set it to 0 for {kind}"
        )
    if name != "multiclass" and task.class_weights is not None:
        raise SpecError(f"task {task.label!r}: class_weights are for multiclass objectives; leave them out for {kind}")


def _suited(graph: Graph) -> tuple[str, tuple[str, ...]]:
    """What the labels of a graph are, in words, and the objectives for them."""
    if graph.regression:
        numbers = "a number" if graph.num_classes == 1 else f"{graph.num_classes} numbers"
        return f"{numbers} to predict per node", REGRESSIONS
    if graph.multilabel:
        return "many labels per node", ("multilabel",)
    return "one class per node", ("multiclass",)


def check_metric(task: Task, name: str, graph: Graph) -> None:
    """A :class:`SpecError` for a metric by name that the labels of the graph do not go with."""
    if task.has_own("metric") and (name in LOWER or name.endswith("loss")):
        raise SpecError(
            f"task {task.label!r}: a metric of your own cannot be called {name!r}: less of such a column is better, "
            "and more of a function's; give it another name, and return an error times -1"
        )
    numbers = name in (*LOWER, "r2")
    if not task.has_own("metric") and numbers != graph.regression:
        kind, _ = _suited(graph)
        fitting = "mse, mae or r2" if graph.regression else "accuracy, f1_micro, f1_macro or roc_auc"
        raise SpecError(
            f"task {task.label!r}: metric={name!r} does not suit graph {task.graph_name!r}, which has {kind}; "
            f"use {fitting}, or a function of your own"
        )
