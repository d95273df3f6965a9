"""Stack: train tasks whose steps differ only in numbers as one step with a leading dimension.

Members may differ in seed, rates, decay, schedule, epochs, patience, dropout, label smoothing, initial weights, and
in width, which is padded with zeros (see :mod:`weft.runtime.step.zero_padding`).

A step never reads a number back to the host: rates come from a table by the step's own counter, dropout from
clocks, and the best weights and the end of training are found by comparisons on the device. So the same code
runs eagerly on a CPU, and on a GPU it is captured once as a CUDA graph and replayed.

Shapes: T members, P parameters, N nodes, C classes, L epochs, M columns of history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from weft.core.compatibility import metric_name, stack_obstacle
from weft.core.task import Task
from weft.runtime.batches.member_splits import OnSplit, StackSplits
from weft.runtime.batches.source import Batch, Source
from weft.runtime.step.best_and_history import Bookkeeper
from weft.runtime.step.evaluation import Evaluation
from weft.runtime.step.forward import LeafForward, Loss
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.members import CannotStack, Members
from weft.runtime.step.objectives import Objective, objective_of_stack
from weft.runtime.step.optimizers import Optimizer
from weft.runtime.step.state import State


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
        self.metric = metric_name(tasks[0], self.graph.multilabel)
        objective = objective_of_stack(tasks, self.graph.multilabel, self.device)
        self.members = Members(tasks, inputs, first_once)
        self._objective_of_all = objective
        self._find_evaluations()
        self.columns = ["loss", *self._evaluations[0].columns]
        flat, buffers = self.members.initial()
        moments = 1 if tasks[0].optimizer == "sgd" else 2
        seeds, epochs = [task.seed for task in tasks], [task.epochs for task in tasks]
        self._wire(State.new(flat, buffers, moments, seeds, epochs, len(self.columns), self._length))
        self.members.try_out(self.state, self._loss_of)
        if any(self.members.without_gradient):
            self._wire(self.state)  # no decay where torch would skip the update

    def _find_evaluations(self) -> None:
        """One evaluation, or one per split if the graph has several."""
        graph, source = self.graph, self.members.source
        self._splits = StackSplits(self.tasks, graph, self.device)
        sources = [OnSplit(source, part.split) for part in self._splits.parts] or [source]
        about = {"classes": graph.num_classes, "multilabel": graph.multilabel}
        self._evaluations = [Evaluation(one, self._objective_of_all, self.metric, **about) for one in sources]
        if any(one.columns != self._evaluations[0].columns for one in self._evaluations):
            raise CannotStack("some of their splits have no nodes of a part that others have")

    def _wire(self, state: State) -> None:
        """Connect the numbers of the tasks and the tensors of ``state``."""
        self.state = state
        self.objective = objective_of_stack(self.tasks, self.graph.multilabel, self.device)
        self._objectives = self._objectives_of(self.tasks, self._splits)
        steps = self.source.steps_per_epoch
        self._optimizer = Optimizer(self.tasks, self.members.layout, self._length, self.device, steps)
        splits = self._evaluations[0].splits
        watched = 1 + len(splits) + splits.index("val") if "val" in splits else None
        self._book = Bookkeeper.of(self.tasks, 1 + len(splits), watched, self.device)
        self.forward = self.members.forward
        self.members.attach(state)
        self.as_written()
        self._ones = torch.ones(state.members, device=self.device)

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
        return self.differentiate != self.gradients

    def as_written(self) -> None:
        """Differentiate and evaluate by the functions of this class, until they are replaced by compiled ones."""
        self.differentiate, self.infer = self.gradients, self.logits

    def _loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean loss ``[T]`` over the batch's rows; where rows are spread over ranks, this rank's part of it."""
        if self._splits.parts:
            return self._loss_by_split(self._splits, self._objectives, logits, batch)
        return self._loss_by(self.objective, logits, batch)

    def _loss_of(self, rows: Sequence[int]) -> Loss:
        """The loss of some members alone."""
        tasks = [self.tasks[row] for row in rows]
        splits = StackSplits(tasks, self.graph, self.device)
        if splits.parts:
            return partial(self._loss_by_split, splits, self._objectives_of(tasks, splits))
        return partial(self._loss_by, objective_of_stack(tasks, self.graph.multilabel, self.device))

    def _objectives_of(self, tasks: Sequence[Task], splits: StackSplits) -> list[Objective]:
        own = [[tasks[place] for place in part.places] for part in splits.parts]
        return [objective_of_stack(some, self.graph.multilabel, self.device) for some in own]

    def _loss_by_split(
        self, splits: StackSplits, objectives: Sequence[Objective], logits: Tensor, batch: Batch
    ) -> Tensor:
        """The mean loss ``[T]``, each over the training rows of its member's split."""
        return splits.compute(
            logits, lambda number, own: objectives[number].loss(own, batch.y, splits.parts[number].split.train)
        )

    def _loss_by(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        if not batch.rows.numel():  # a rank without training rows still takes part in the backward pass
            return logits.index_select(-2, batch.rows).sum((-2, -1))
        losses = objective.loss(logits, batch.y, batch.rows)
        return losses if self.source.reduce.ranks == 1 else losses * batch.share

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
        with torch.no_grad():
            logits = self.source.logits(lambda batch: self.infer(self.state.flat, batch), self.members.layers)
            rows = torch.cat([losses[:, None], self._evaluated(logits)], 1)
            self._book(self.state, rows, steps)

    def _evaluated(self, logits: Tensor) -> Tensor:
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
        self._optimizer.update(state.flat, grad, state.moments, state.step)
        return losses

    def gradients(self, flat: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses ``[T]`` at the weights ``flat [T, P]`` and their gradients ``[T, P]``; batch norms are updated."""
        if self.source.reduce.ranks > 1:
            return self._gradients_over_ranks(flat, batch)
        return self.forward.gradients(flat, batch, self._loss, self._ones)

    def _gradients_over_ranks(self, flat: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same where rows are spread over ranks: gradients are on their way while the backward pass goes on."""
        from weft.dist.early_gradients import EarlyGradients

        early = EarlyGradients(
            self.members.layout.sizes, flat.shape[0], self.members.in_first_layer, self.source.reduce
        )
        with self.forward.watched(early.take) as leaves:
            losses = self._loss(self.forward(flat.detach(), training=True, batch=batch), batch)
        grads = torch.autograd.grad(losses, leaves, self._ones, allow_unused=True)
        found = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]
        return early.finish(losses.detach(), found)

    def logits(self, flat: Tensor, batch: Batch) -> Tensor:
        """The members' logits for the rows of a batch ``[T, N, C]`` with the weights ``flat [T, P]``."""
        return self.forward(flat, training=False, batch=batch)

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

    # ---- leaving -------------------------------------------------------------------------------------

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the members in ``rows``, in new tensors: a CUDA graph of the step is invalid after this."""
        self.members.select(rows)
        if self._splits.parts:
            self._find_evaluations()
        self._wire(self.state.select(rows))


def check_alike(tasks: Sequence[Task], multilabel: bool = False) -> None:
    """:class:`CannotStack` unless the steps of ``tasks`` have the same operators."""
    reason = stack_obstacle(tasks, multilabel)
    if reason is not None:
        raise CannotStack(reason)
