"""Training objectives: cross-entropy, binary cross-entropy for many labels, regression losses, or a user's function.

Shapes: N nodes, M rows, C classes or labels; ``logits [..., N, C]``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from weft import ops
from weft.batches.source import Batch, StackSplits
from weft.core.compatibility import REGRESSIONS, function_name, objective_name
from weft.core.errors import SpecError
from weft.core.settings import LOWER
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.runtime.device.process import same_draws
from weft.runtime.modules.settings import function_of

PerRow = Callable[[Tensor, Tensor], Tensor]  # (logits, targets) -> a loss per row
REPEATED = 1e-5  # of the largest: sums on a GPU may be added up in another order each time

# ---- What a model returns: logits, logits with an auxiliary loss, or anything that a user's objective takes.
#
# Shapes: T members, N nodes, C classes.


def with_member(output: Any) -> Any:
    """What one member's model returned, with a leading dimension of one member."""
    return output[None] if isinstance(output, Tensor) else pytree.tree_map_only(Tensor, lambda t: t[None], output)


def of_member(output: Any, row: int) -> Any:
    """One member's part of what a stack returned, floating-point numbers in float32."""
    return pytree.tree_map_only(
        Tensor, lambda tensor: tensor[row].float() if tensor.is_floating_point() else tensor[row], output
    )


def logits_and_extra(output: Any, label: str = "") -> tuple[Tensor, Tensor | None]:
    """Logits ``[T, N, C]`` and the auxiliary loss ``[T]`` of ``(logits, loss)``, None without one."""
    if isinstance(output, Tensor):
        return output, None
    pair = isinstance(output, (tuple, list)) and len(output) == 2 and all(isinstance(part, Tensor) for part in output)
    if not pair or output[1].dim() != output[0].dim() - 2:
        start = f"task {label!r}: " if label else ""
        raise SpecError(
            f"{start}the model returned {kind_of(output)}; expected logits, or (logits, loss) with an auxiliary loss "
            "of no dimensions; for anything else give objective= and metric= functions that read it"
        )
    return output[0], output[1].float()


def kind_of(output: Any) -> str:
    """An output in words: ``tuple(tensor [5, 3], tensor [5, 3])``."""
    if isinstance(output, Tensor):
        return f"tensor {list(output.shape)}"
    if isinstance(output, (tuple, list)):
        return f"{type(output).__name__}({', '.join(map(kind_of, output))})"
    return type(output).__name__


def first_tensor(output: Any) -> Tensor | None:
    """The logits among whatever a model returned, for a metric by name: the output, or the first of several."""
    if isinstance(output, Tensor):
        return output
    first = output[0] if isinstance(output, (tuple, list)) and output else None
    return first if isinstance(first, Tensor) else None


def as_one(output: Any) -> Tensor:
    """All numbers of an output in one tensor, to compare it with another."""
    if isinstance(output, Tensor):
        return output
    tensors = [leaf.reshape(-1) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    real = [torch.view_as_real(t).reshape(-1) if t.is_complex() else t for t in tensors]
    return torch.cat([t.float() for t in real]) if real else torch.zeros(0)


# ---- Users' own functions in a training loop: find them, call them for every member, check what they return.


def is_torchs(function: Any) -> bool:
    """Whether it is a loss of torch, such as ``nn.MSELoss()``, ``F.mse_loss`` or a ``partial`` of one."""
    while isinstance(function, partial):
        function = function.func
    call = function.forward if isinstance(function, nn.Module) else function
    return getattr(call, "__module__", "").startswith("torch.nn")


def takes_two(function: Callable[..., Any]) -> bool:
    """True for a loss of torch, whose third argument is no row, and for any function that needs two arguments.

    A third one with a default counts if it is called ``rows``.
    """
    if is_torchs(function):
        return True
    try:
        call = function.forward if isinstance(function, nn.Module) else function
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # a function of C has no signature
        return False
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each for each in positional if each.default is each.empty]
    several = any(each.kind is each.VAR_POSITIONAL or each.name == "rows" for each in parameters)
    return len(positional) >= 2 >= len(needed) and not several


class OwnMeasure:
    """A user's objective or metric ``(output, targets, rows) -> number`` for all members: ``[T]``.

    ``output`` is what the model returned for all rows of the batch (in float32), ``targets`` the labels of these,
    ``rows`` those to measure. It is called once per member, so that it can be written for one. A loss of torch, or any
    other function of two arguments, is given the output and the targets of these rows. A module is copied to where it
    is called, with its class weights.
    """

    def __init__(self, task: Task, setting: str) -> None:
        self.name, self._setting, self._label = function_name(getattr(task, setting)), setting, task.label
        self.function = function_of(task, setting)
        if isinstance(self.function, type):
            raise SpecError(f"task {task.label!r}: {setting} {self.name} is a class; give an object, {self.name}()")
        self._of_rows, self._torchs = takes_two(self.function), is_torchs(self.function)
        self._on: dict[torch.device, Callable[..., Any]] = {}
        self._checked = False  # that it does not broadcast
        parameters = self.function.named_parameters() if isinstance(self.function, nn.Module) else ()
        training = [name for name, parameter in parameters if parameter.requires_grad]
        if training and setting == "objective":
            raise SpecError(
                f"task {task.label!r}: objective {self.name} has parameters of its own ({', '.join(training)}), which "
                "no optimizer would train: let the model have them and return the loss, or freeze them"
            )

    def __call__(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        """The number of every member ``[T]``."""
        members = next(leaf.shape[0] for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
        return torch.stack([self._of_member(of_member(output, row), labels, rows) for row in range(members)])

    def _of_member(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        if self._of_rows:
            value = self._of_two(output, labels[rows], rows)
        else:
            value = self._at(labels.device)(output, labels, rows)
        if self._setting == "metric" and isinstance(value, (int, float)):
            return torch.tensor(float(value), device=labels.device)
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            remedy = "; give it reduction='mean'" if getattr(self.function, "reduction", "mean") == "none" else ""
            raise SpecError(
                f"task {self._label!r}: {self._setting} {self.name} returned {what}; expected one number{remedy}"
            )
        if (
            self._setting == "objective"
            and not value.requires_grad
            and torch.is_grad_enabled()
            and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(output))
        ):
            raise SpecError(
                f"task {self._label!r}: objective {self.name} returned a number that autograd cannot follow back to "
                "the model's output; compute it with torch, without detach, item or no_grad"
            )
        return value.reshape(()).float()

    def _of_two(self, output: Any, targets: Tensor, rows: Tensor) -> Any:
        """What a function of two arguments gives for the ``rows`` of one member, with their ``targets``."""
        if not isinstance(output, Tensor):
            raise SpecError(
                f"task {self._label!r}: {self._setting} {self.name} takes an output and labels, but the model returned "
                f"{kind_of(output)}; give a function (output, y, rows) that reads it"
            )
        predicted, function = output[rows], self._at(targets.device)
        if predicted.dim() == 2 and predicted.shape[1] == 1 and targets.dim() == 1 and targets.is_floating_point():
            if self._torchs:
                targets = targets[:, None]
            elif not self._checked and not targets.is_meta and targets.numel() > 1:
                self._check_column(function, predicted.detach(), targets)
        try:
            return function(predicted, targets)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if not self._torchs or isinstance(error, torch.OutOfMemoryError):  # an own function has lines to name
                raise
            what = f"an output {list(predicted.shape)} and labels {list(targets.shape)} of {targets.dtype}"
            first = str(error).splitlines()[0]
            raise SpecError(
                f"task {self._label!r}: {self._setting} {self.name} does not take {what}: {first}"
            ) from error

    def _check_column(self, function: Callable[..., Any], predicted: Tensor, targets: Tensor) -> None:
        """A :class:`SpecError` if a function broadcasts ``predicted [M, 1]`` and ``targets [M]`` to ``[M, M]``."""
        self._checked = True
        try:
            value, of_vectors = (torch.as_tensor(function(out, targets)) for out in (predicted, predicted[:, 0]))
        except Exception:  # it reads a column of the output, as it should
            return
        if not torch.allclose(value.double(), of_vectors.double(), rtol=REPEATED, equal_nan=True):
            raise SpecError(
                f"task {self._label!r}: {self._setting} {self.name} compares an output [M, 1] with labels [M], which "
                "torch broadcasts to [M, M]; write output.squeeze(-1) in it"
            )

    def _at(self, device: torch.device) -> Callable[..., Any]:
        """The function on ``device``: a module may have tensors, such as weights of classes."""
        if not isinstance(self.function, nn.Module):
            return self.function
        if device not in self._on:
            self._on[device] = copy.deepcopy(self.function).to(device)
        return self._on[device]


# ---- Objectives by name.
#
# Shapes: T members, N nodes, M rows, C classes, D numbers to predict; ``logits [..., N, C]``.


@dataclass(frozen=True)
class Objective:
    """``loss(logits, labels, rows)`` to differentiate, and ``per_row(logits, target)``, of which it is the mean.

    ``per_row`` is None for a loss that is no mean over rows: the loss of a split is then that of its rows. ``own``: it
    is a function of the user's own, which receives whatever the model returned. ``smoothing``: of labels ``[T]``.
    """

    name: str
    loss: Callable[[Any, Tensor, Tensor], Tensor]
    per_row: PerRow | None
    own: bool = False
    smoothing: Tensor | None = None


def multiclass_rows(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of every row ``[..., M]`` for ``logits [..., M, C]``, ``target [M]`` int64."""
    # Nodes last, so that a CPU's softmax runs along them: 5x quicker for Cora's 7 classes.
    log_p = logits.transpose(-1, -2).contiguous().log_softmax(-2)
    index = target.expand(*logits.shape[:-2], 1, -1)
    return log_p.gather(-2, index).squeeze(-2).neg()


def errors(output: Tensor, target: Tensor) -> Tensor:
    """What every number is off by ``[..., M, D]``, for ``output [..., M, D]``, ``target [M, D]`` or ``[M]``."""
    return output - (target[:, None] if target.dim() == 1 else target)


def _mean_of(name: str, per_row: PerRow, smoothing: Tensor | None = None) -> Objective:
    """The objective that is the mean of ``per_row``."""

    def loss(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        return per_row(logits.index_select(-2, rows).float(), labels.index_select(0, rows)).mean(-1)

    return Objective(name, loss, per_row, smoothing=smoothing)


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
            raise SpecError(
                f"task {task.label!r}: class_weights are for multiclass objectives; leave them out for {kind}"
            )
    if not graph.regression and not graph.multilabel:
        return _multiclass(tasks, graph, device, graph.train if train is None else train)
    name = objective_name(tasks[0], graph.multilabel, graph.regression)
    delta = torch.tensor([task.huber_delta for task in tasks], device=device) if name == "huber" else None

    def per_row(logits: Tensor, target: Tensor) -> Tensor:
        """The loss of every row, a mean over its numbers or labels ``[..., M]``."""
        if name == "multilabel":
            target = target.expand(logits.shape)
            return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1)
        error = errors(logits, target)
        if name == "huber":  # half the square below delta, a straight line above
            size, width = error.abs(), delta[:, None, None]
            return torch.where(size < width, 0.5 * size.square(), width * (size - 0.5 * width)).mean(-1)
        return (error.square() if name == "mse" else error.abs()).mean(-1)

    return _mean_of(name, per_row)


def _multiclass(tasks: Sequence[Task], graph: Graph, device: torch.device, train: Tensor) -> Objective:
    """Cross-entropy, with label smoothing ``[T]`` and class weights ``[T, C]`` if the tasks have them."""
    numbers = [task.label_smoothing for task in tasks]
    smoothing = torch.tensor(numbers, device=device) if any(numbers) else None

    def smoothed_rows(logits: Tensor, target: Tensor) -> Tensor:
        uniform, share = torch.logsumexp(logits, -1) - logits.mean(-1), smoothing[..., None]
        return (1 - share) * multiclass_rows(logits, target) + share * uniform

    if tasks[0].class_weights is None and smoothing is None:
        return Objective("multiclass", ops.cross_entropy_rows, multiclass_rows)
    if tasks[0].class_weights is None:
        return _mean_of("multiclass", smoothed_rows, smoothing)
    members, classes = [], graph.num_classes
    for task in tasks:
        if isinstance(task.class_weights, tuple) and len(task.class_weights) != classes:
            raise SpecError(
                f"task {task.label!r}: class_weights has {len(task.class_weights)} numbers for {classes} classes of "
                f"graph {task.graph_name!r}; give one per class"
            )
        if isinstance(task.class_weights, tuple):
            members.append(torch.tensor(task.class_weights, device=device))
        elif graph.y.is_meta:
            members.append(torch.ones(classes, device=device))
        else:  # "balanced": inverse to how often a class is among the training nodes
            labels = graph.y.index_select(0, train.to(graph.y.device))
            counts = torch.bincount(labels, minlength=classes).to(device)
            members.append(torch.where(counts > 0, counts.sum() / (classes * counts.clamp(min=1)), 0.0).float())
    weights = torch.stack(members)

    def weighted(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """``F.cross_entropy(logits[rows], labels[rows], weight, label_smoothing=...)`` of every member.

        A weighted mean over rows, by the weights of their classes.
        """
        log_p, target = logits.index_select(-2, rows).float().log_softmax(-1), labels.index_select(0, rows)
        of_rows = weights.index_select(-1, target)  # [T, M]
        right = log_p.gather(-1, target.expand(log_p.shape[:-1])[..., None]).squeeze(-1)
        total, loss = of_rows.sum(-1), -(of_rows * right).sum(-1)
        if smoothing is None:
            return loss / total
        uniform = -(log_p * weights[:, None]).sum((-2, -1)) / log_p.shape[-1]
        return ((1 - smoothing) * loss + smoothing * uniform) / total

    return Objective("multiclass", weighted, None, smoothing=smoothing)


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


def try_measures(measured: Callable[[], Tensor], task: Task, device: torch.device) -> str | None:
    """Call ``measured()``, which calls the functions, twice; why its step can neither be stacked nor captured, or None.

    A :class:`SpecError` if the second call gives other numbers: the functions are also called in evaluations, so what
    they keep between calls would not be what it is in a plain loop.
    """
    own = [setting for setting in ("objective", "metric") if task.has_own(setting)]
    names = ", ".join(f"{setting} {function_name(getattr(task, setting))}" for setting in own)
    with same_draws(device) as moved:
        first = measured().detach().clone()
        drawn = moved()
    if first.is_meta:
        return None
    with same_draws(device):
        second = measured().detach()
    largest = float(first.abs().nan_to_num(0.0, 0.0, 0.0).max())
    if not torch.allclose(first, second, rtol=0.0, atol=REPEATED * max(largest, 1e-30), equal_nan=True):
        raise SpecError(
            f"task {task.label!r}: {names} gives other numbers when called again with the same; Weft also calls it in "
            "evaluations, so write it without anything that it keeps between calls"
        )
    return f"{names} draws random numbers" if drawn else None


def check_reads_output_alone(loss: Callable[[Any], Tensor], output: Any, task: Task) -> None:
    """A :class:`SpecError` if the objective depends on weights other than through ``output``.

    Such are those of a model that was given as an object, of which a copy is trained: a penalty on them would be a
    constant.
    """
    if not all(isinstance(leaf, (Tensor, int, float, str, NoneType)) for leaf in pytree.tree_leaves(output)):
        return
    try:
        losses = loss(pytree.tree_map_only(Tensor, Tensor.detach, output))
    except Exception:  # it may differentiate the output by itself
        return
    if losses.requires_grad:
        raise SpecError(
            f"task {task.label!r}: objective {function_name(task.objective)} reads weights other than through what the "
            "model returns; Weft trains a copy of the model and no other weights: let the model return what the loss "
            "needs, (logits, loss) for a penalty, or read them under torch.no_grad() if they are constant"
        )


def check_ranks(task: Task, mean_of_rows: bool, own_metric: bool, ranks: int) -> None:
    """A :class:`SpecError` for a loss or an update that rows on several ranks cannot share."""
    if ranks == 1:
        return
    what = "class_weights" if task.class_weights is not None else f"objective {function_name(task.objective)}"
    reasons = {
        what: not mean_of_rows,
        f"metric {function_name(task.metric)}": own_metric,
        f"optimizer {function_name(task.optimizer)}": task.has_own("optimizer"),
    }
    for name, refused in reasons.items():
        if refused:
            raise SpecError(
                f"task {task.label!r}: {name} needs all rows in one place; train it on one rank, not {ranks}"
            )


class StackLoss:
    """The mean training loss of a stack's members, each over the training rows of its split.

    What the models of ``tasks`` returned and a batch -> losses ``[T]``; over ranks, this rank's part of them.
    ``objective``: of all members; ``objectives``: one per split, or that one if all members have the same split.
    """

    def __init__(
        self, tasks: Sequence[Task], splits: StackSplits, graph: Graph, device: torch.device, ranks: int
    ) -> None:
        self._label, self._splits, self._ranks = tasks[0].label, splits, ranks
        self.objective = objective_of_stack(tasks, graph, device)
        parts = [([tasks[index] for index in part.positions], part.split.train) for part in splits.parts]
        by_split = [objective_of_stack(some, graph, device, train) for some, train in parts]
        self.objectives = by_split or [self.objective]
        shares = [graph.train_share(tasks[part.positions[0]].split or 0) for part in splits.parts]
        self._shares = [torch.full((1,), share, device=device) for share in shares]

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """The mean loss ``[T]`` over the batch's rows."""
        if not self._splits.parts:
            return self._by(self.objective, output, batch)

        def of_split(number: int, part: Any) -> Tensor:
            rows = self._splits.parts[number].split.train
            return self._by(self.objectives[number], part, replace(batch, rows=rows, share=self._shares[number]))

        return self._splits.compute(output, of_split)

    def _by(self, objective: Objective, output: Any, batch: Batch) -> Tensor:
        if objective.own:
            return objective.loss(output, batch.y, batch.rows)
        logits, extra = logits_and_extra(output, self._label)
        if not batch.rows.numel():  # a rank without training rows still takes part in the backward pass
            losses = logits.index_select(-2, batch.rows).sum((-2, -1))
        else:
            losses = objective.loss(logits, batch.y, batch.rows)
            losses = losses if self._ranks == 1 else losses * batch.share
        if extra is None:
            return losses
        if self._ranks > 1:
            raise SpecError(
                f"task {self._label!r}: the model returns a loss of its own, which {self._ranks} "
                "ranks cannot share; train it on one rank"
            )
        return losses + extra
