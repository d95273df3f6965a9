"""Stack: train tasks whose steps differ only in numbers as one step with a leading dimension.

Members may differ in seed, rates, decay, schedule, epochs, patience, dropout, label smoothing, initial weights, and
in width, which is padded with zeros (see :mod:`weft.runtime.step.members`).

A step never reads a number back to the host: rates come from a table by the step's own counter, dropout from
clocks, and the best weights and the end of training are found by comparisons on the device. So the same code
runs eagerly on a CPU, and on a GPU it is captured once as a CUDA graph and replayed.

Shapes: T members, P parameters, N nodes, C classes, L epochs, M columns of history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.source import Batch, OnSplit, Source, StackSplits
from weft.core.compatibility import eager_reason, metric_name, stack_obstacle
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.runtime.device.process import same_draws
from weft.runtime.modules.state import ModuleState
from weft.runtime.step.copies import evaluated_by_copy, model_of
from weft.runtime.step.evaluation import Bookkeeper, Evaluation
from weft.runtime.step.forward import LeafForward, Loss
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.losses import (
    Objective,
    OwnMeasure,
    StackLoss,
    check_metric,
    check_ranks,
    check_reads_output_alone,
    logits_and_extra,
    objective_of_stack,
    try_measures,
    with_member,
)
from weft.runtime.step.members import CannotStack, Members
from weft.runtime.step.optimizers import Optimizer, OwnOptimizer
from weft.runtime.step.preflight import Preflight
from weft.runtime.step.schedules import RATE, Plateau
from weft.runtime.step.state import State, initial_extras


class Stack:
    """T tasks in training on ``inputs.device``.

    ``first_once``: compute the first layer's aggregation of the features before training, if the model offers it.
    ``length``: rows of history and of the table of rates, at least the most epochs of a member. ``notes`` holds
    remarks for the user. Raises :class:`CannotStack` for tasks that have to train separately.
    """

    def __init__(self, tasks: Sequence[Task], inputs: Inputs, *, first_once: bool = False, length: int = 0) -> None:
        check_alike(tasks, inputs.graph.multilabel)
        self.graph, self.device = inputs.graph, inputs.device
        self._length = max([length, *(task.epochs for task in tasks)])
        self.metric = metric_name(tasks[0], self.graph.multilabel, self.graph.regression)
        objective = objective_of_stack(tasks, self.graph, self.device)
        check_metric(tasks[0], self.metric, self.graph)
        own_metric = OwnMeasure(tasks[0], "metric") if tasks[0].has_own("metric") else None
        self.members = Members(tasks, inputs, first_once)
        check_ranks(tasks[0], objective.per_row is not None, own_metric is not None, self.source.reduce.ranks)
        self._objective_of_all, self._own_metric = objective, own_metric
        self._find_evaluations()
        self.columns = ["loss", *self._evaluations[0].columns]
        flat, buffers = self.members.initial()
        moments = 0 if tasks[0].has_own("optimizer") else 1 if tasks[0].optimizer == "sgd" else 2
        seeds, epochs = [task.seed for task in tasks], [task.epochs for task in tasks]
        numbers = (len(self.columns), self._length, initial_extras(tasks, flat))
        self._own_optimizer: OwnOptimizer | None = None
        self.eager: str | None = eager_reason(tasks[0])  # why its step is never captured
        self.best_state: ModuleState | None = None  # a user's module when its best weights were evaluated
        self.best_copy: nn.Module | None = None  # the same as a copy, if not all of its state is plain data
        self._wire(State.new(flat, buffers, moments, seeds, epochs, *numbers))
        Preflight(self.members, self.state, self._loss_of)()
        if any(self.members.without_gradient):
            self._wire(self.state)  # no decay where torch would skip the update
        self._try_functions()

    def _find_evaluations(self) -> None:
        """One evaluation, or one per split if the graph has several."""
        graph, source = self.graph, self.members.source
        self._splits = StackSplits(self.tasks, graph, self.device)
        sources = [OnSplit(source, part.split) for part in self._splits.parts] or [source]
        about = {"classes": graph.num_classes, "multilabel": graph.multilabel, "own_metric": self._own_metric}
        self._evaluations = [Evaluation(one, self._objective_of_all, self.metric, **about) for one in sources]
        if any(one.columns != self._evaluations[0].columns for one in self._evaluations):
            raise CannotStack("some of their splits have no nodes of a part that others have")

    def _wire(self, state: State) -> None:
        """Connect the numbers of the tasks and the tensors of ``state``."""
        self.state = state
        self._loss = self._make_loss(self.tasks, self._splits)
        for evaluation, objective in zip(self._evaluations, self._loss.objectives, strict=True):
            evaluation.objective = objective
        self._optimizer = self._make_optimizer(state)
        splits = self._evaluations[0].splits
        watched = 1 + len(splits) + splits.index("val") if "val" in splits else None
        self._book = Bookkeeper.of(self.tasks, 1 + len(splits), watched, self.device, self.metric)
        self._plateau = self._make_plateau()
        self.forward = self.members.forward
        self.members.attach(state)
        self.as_written()
        self._ones = torch.ones(state.members, device=self.device)

    def _make_optimizer(self, state: State) -> Optimizer | OwnOptimizer:
        """Weft's, or torch's, which is made once: it keeps what it has learnt."""
        steps = self.source.steps_per_epoch
        if not self.tasks[0].has_own("optimizer"):
            return Optimizer(self.tasks, self.members.layout, self._length, self.device, steps)
        if self._own_optimizer is None:
            layout, model = self.members.layout, self.members.model
            self._own_optimizer = OwnOptimizer(self.tasks[0], layout, model, state.flat, steps)
        self._own_optimizer.torch.without = frozenset(self.members.without_gradient)
        return self._own_optimizer

    def _make_plateau(self) -> Plateau | None:
        if self.tasks[0].schedule != "plateau":
            return None
        own = self._own_optimizer
        rates = [task.lr for task in self.tasks] if own is None else [own.torch.first_rate]
        return Plateau(self.tasks, self.columns, rates, self.device)

    def _try_functions(self) -> None:
        """Call users' own objective and metric before the first epoch, so that errors show; see what they do."""
        if not self.objective.own and self._own_metric is None:
            return
        if not self.source.constant and not self.members.plain_output:
            raise SpecError(
                f"task {self.tasks[0].label!r}: model {self.tasks[0].model_name} returns more than one tensor, which "
                "sampled training cannot put together from batches; train it with mode='full'"
            )
        with same_draws(self.device):
            outputs = self._outputs_to_try()
            if self.objective.own:
                batch = self.source.example()
                check_reads_output_alone(lambda output: self._loss(output, batch), outputs[0], self.tasks[0])
            tried = try_measures(lambda: self._measured(*outputs), self.tasks[0], self.device)
        if tried is not None and self.state.members > 1:
            raise CannotStack(tried)
        self.eager = self.eager or tried

    def _outputs_to_try(self) -> tuple[Any, Any]:
        """What the model returns in training and in evaluation; a module that keeps something is called as a copy."""
        batch = self.source.example()
        if self.members.hidden_state is not None:
            output = with_member(evaluated_by_copy(self.members, self.state, batch))
            return output, output
        before = self.state.snapshot()
        output = self.forward(self.state.flat, training=True, batch=batch)
        self.state.restore(before)
        with torch.no_grad():
            return output, self.logits(self.state.evaluated, batch)

    def _measured(self, output: Any, evaluated: Any) -> Tensor:
        """Training losses, and a row of an evaluation if a batch is the whole graph, in one tensor."""
        losses = self._loss(output, self.source.example())
        if not self.source.constant:
            return losses.detach()
        with torch.no_grad():
            return torch.cat([losses[:, None], self._evaluated(evaluated)], 1)

    @property
    def objective(self) -> Objective:
        """Of all members."""
        return self._loss.objective

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the members, row by row."""
        return self.members.tasks

    @property
    def source(self) -> Source:
        """Where its batches come from."""
        return self.members.source

    @property
    def notes(self) -> list[str]:
        """Remarks for the user."""
        return self.members.notes

    @property
    def is_compiled(self) -> bool:
        """Whether the step is compiled."""
        return self.compiled is not None

    @property
    def differentiate(self) -> Callable[[Tensor, Batch], tuple[Tensor, Tensor]]:
        """What computes losses and gradients: :meth:`gradients`, or what was compiled of it."""
        return self.gradients if self.compiled is None else self.compiled[0]

    @property
    def infer(self) -> Callable[[Tensor, Batch], Any]:
        """What computes logits: :meth:`logits`, or what was compiled of it."""
        return self.logits if self.compiled is None else self.compiled[1]

    def as_written(self) -> None:
        """Differentiate and evaluate by the functions of this class, until they are replaced by compiled ones."""
        self.compiled: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def _loss_of(self, rows: Sequence[int]) -> Loss:
        """The loss of some members alone."""
        tasks = [self.tasks[row] for row in rows]
        return self._make_loss(tasks, StackSplits(tasks, self.graph, self.device))

    def _make_loss(self, tasks: Sequence[Task], splits: StackSplits) -> StackLoss:
        return StackLoss(tasks, splits, self.graph, self.device, self.source.reduce.ranks)

    # ---- one epoch -----------------------------------------------------------------------------------

    def __call__(self) -> None:
        """One epoch of a constant source: train, evaluate the new weights, record the outcome."""
        self.evaluate(self.train_step(self.source.example()))

    def without_evaluation(self) -> None:
        """One epoch of a constant source that records only its training losses."""
        self.note(self.train_step(self.source.example()))

    def train_on(self, batch: Batch) -> None:
        """One of several steps of an epoch: train, and count the step and its part of the epoch's loss."""
        losses = self.train_step(batch)
        self.state.epoch_loss.add_(losses * (batch.share if batch.of_epoch is None else batch.of_epoch))
        self.state.steps.add_(1)

    def end_epoch(self, evaluated: bool) -> None:
        """After the last of several steps: record the epoch's mean loss, with an evaluation or without."""
        losses = self.state.epoch_loss.clone()
        self.state.epoch_loss.zero_()
        (self.evaluate if evaluated else self.note)(losses, steps=0)

    def evaluate(self, losses: Tensor, steps: int = 1) -> None:
        """End an epoch with ``losses [T]``: evaluate the weights, record the outcome, count ``steps``."""
        state, buffers = self.members.module_state(), self._buffers_to_evaluate()
        copy = self._copied() if self.members.unsaved else None
        with torch.no_grad():
            logits = self.source.logits(lambda batch: self.infer(self.state.evaluated, batch), self.members.layers)
            rows = torch.cat([losses[:, None], self._evaluated(logits)], 1)
            if self._plateau is not None:
                self._plateau(self.state.extras, rows, self.state.epoch)
            at = 0 if state is None else int(self.state.first_epoch)
            with self._as_evaluated(buffers):
                self._book(self.state, rows, steps)
            if state is not None and int(self.state.best_epoch[0]) == at:  # it is alone, and its step is not captured
                self.best_state, self.best_copy = state, copy

    def _copied(self) -> nn.Module:
        own = {name: buffer[0] for name, buffer in self.state.buffers.items()}
        return model_of(self.members, self.members.slots[0], self.state.evaluated[0], own, self.state)

    def _buffers_to_evaluate(self) -> dict[str, Tensor]:
        """Copies of the buffers, if an evaluation changes them: best weights go with what they were evaluated with."""
        changed = self.members.changed_in_evaluation
        return {name: one.clone() for name, one in self.state.buffers.items()} if changed else {}

    @contextmanager
    def _as_evaluated(self, buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the state has these ``buffers``."""
        after = {name: self.state.buffers[name].clone() for name in buffers}
        for name, one in buffers.items():
            self.state.buffers[name].copy_(one)
        yield
        for name, one in after.items():
            self.state.buffers[name].copy_(one)

    def _evaluated(self, logits: Any) -> Tensor:
        if not self._splits.parts:
            return self._evaluations[0](logits)
        return self._splits.compute(logits, lambda number, own: self._evaluations[number](own))

    def note(self, losses: Tensor, steps: int = 1) -> None:
        """End an epoch with ``losses [T]`` that is not evaluated: record them, count ``steps``."""
        self._book.loss_alone(self.state, losses, steps)

    def train_step(self, batch: Batch) -> Tensor:
        """Forward, loss, backward and update in place; the losses ``[T]``."""
        state = self.state
        losses, grad = self.differentiate(state.flat, batch)
        if self._own_optimizer is not None and self.compiled is None and isinstance(self.forward, LeafForward):
            self._own_optimizer.torch.without = frozenset(self.forward.without_gradient or ())
        self._optimizer.update(state.flat, grad, state.moments, state.step, state.extras)
        return losses

    def gradients(self, flat: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses ``[T]`` at the weights ``flat [T, P]`` and their gradients ``[T, P]``; batch norms are updated."""
        if self.source.reduce.ranks > 1:
            return self._gradients_over_ranks(flat, batch)
        return self.forward.gradients(flat, batch, self._loss, self._ones)

    def _gradients_over_ranks(self, flat: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same where rows are spread over ranks: gradients are on their way while the backward pass goes on."""
        from weft.dist.reduce import EarlyGradients

        early = EarlyGradients(
            self.members.layout.sizes, flat.shape[0], self.members.in_first_layer, self.source.reduce
        )
        with self.forward.watched(early.take) as leaves:
            losses = self._loss(self.forward(flat.detach(), training=True, batch=batch), batch)
        grads = torch.autograd.grad(losses, leaves, self._ones, allow_unused=True)
        found = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]
        return early.finish(losses.detach(), found)

    def logits(self, flat: Tensor, batch: Batch) -> Tensor:
        """The members' logits for the rows of a batch ``[T, N, C]`` with the weights ``flat [T, P]``.

        For an objective of the user's own, whatever the model returns.
        """
        output = self.forward(flat, training=False, batch=batch)
        return output if self.objective.own or isinstance(output, Tensor) else logits_and_extra(output)[0]

    @contextmanager
    def as_function(self) -> Iterator[None]:
        """Inside, the model is a function of the weights it is given, as a trace needs it."""
        if not isinstance(self.forward, LeafForward):
            yield
            return
        own = self.forward
        with own.as_function() as self.forward:
            try:
                yield
            finally:
                self.forward = own

    # ---- what torch's optimizer keeps, and rates changed from outside ----------------------------------

    def loop_state(self) -> dict[str, Tensor]:
        """What an optimizer of torch's keeps, for a checkpoint; empty without one."""
        return {} if self._own_optimizer is None else self._own_optimizer.torch.saved()

    def restore_loop_state(self, saved: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`loop_state`."""
        if self._own_optimizer is not None:
            self._own_optimizer.torch.restore(saved)

    def scale_rate(self, row: int, factor: float) -> None:
        """Multiply the rate of a member's later steps."""
        self.state.extras[RATE][row].mul_(factor)

    # ---- leaving -------------------------------------------------------------------------------------

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the members in ``rows``, in new tensors: a CUDA graph of the step is invalid after this."""
        self.members.select(rows)
        if self._splits.parts:
            self._find_evaluations()
        self._wire(self.state.select(rows))

    def move_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with ``tensors``, equal to those of the state, in other places; before a step is captured."""
        self._wire(self.state.of(tensors))


def check_alike(tasks: Sequence[Task], multilabel: bool = False) -> None:
    """:class:`CannotStack` unless the steps of ``tasks`` have the same operators."""
    reason = stack_obstacle(tasks, multilabel)
    if reason is not None:
        raise CannotStack(reason)
