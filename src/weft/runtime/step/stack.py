"""Stack: tasks whose steps are the same but for numbers, trained as one step with a leading dimension.

Members may differ in seed, rates, decay, schedule, epochs, patience, dropout, label smoothing, initial weights, and
in width, which is padded with zeros (see :mod:`weft.runtime.step.zero_padding`).

Nothing in a step asks the host for a number: rates come from a table by the step's own counter, dropout from
clocks, and the best weights and the end of training are found by comparisons on the device. So the same code
runs eagerly on a CPU and is recorded once and replayed on a GPU.

Shapes: T members, P parameters, N nodes, C classes, L epochs, M columns of history.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.compatibility import metric_name, stack_obstacle
from weft.core.task import Task
from weft.runtime.step.best_and_history import Recorder
from weft.runtime.step.evaluation import Evaluation
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.members import CannotStack, Members
from weft.runtime.step.objectives import objective_of_stack
from weft.runtime.step.optimizers import Optimizer
from weft.runtime.step.state import State


class Stack:
    """T tasks in training on the device of ``inputs.graph``.

    ``first_once``: compute the first layer's aggregation of the features before training, where the model offers it.
    ``length``: rows of history and of the table of rates, at least the most epochs of a member. ``notes`` holds
    remarks for the user. Raises :class:`CannotStack` for tasks that have to train apart.
    """

    def __init__(self, tasks: Sequence[Task], inputs: Inputs, *, first_once: bool = False, length: int = 0) -> None:
        check_alike(tasks, inputs.graph.multilabel)
        self.graph, self.device = inputs.graph, inputs.graph.device
        self._length = max([length, *(task.epochs for task in tasks)])
        self.metric = metric_name(tasks[0], self.graph.multilabel)
        objective = objective_of_stack(tasks, self.graph.multilabel, self.device)
        self._evaluation = Evaluation(self.graph, objective, self.metric)
        self.columns = ["loss", *self._evaluation.columns]
        self.members = Members(tasks, inputs, first_once)
        flat, buffers = self.members.initial()
        moments = 1 if tasks[0].optimizer == "sgd" else 2
        seeds, epochs = [task.seed for task in tasks], [task.epochs for task in tasks]
        self._wire(State.new(flat, buffers, moments, seeds, epochs, len(self.columns), self._length))
        self.members.try_out(self.state, self._loss_of_one)

    def _wire(self, state: State) -> None:
        """Connect the numbers of the tasks and the tensors of ``state``."""
        self.state = state
        self.objective = objective_of_stack(self.tasks, self.graph.multilabel, self.device)
        self._optimizer = Optimizer(self.tasks, self.members.layout, self._length, self.device)
        splits = self._evaluation.splits
        watched = 1 + len(splits) + splits.index("val") if "val" in splits else None
        self._record = Recorder.of(self.tasks, 1 + len(splits), watched, self.device)
        self.forward = self.members.forward
        self.members.attach(state)
        self.as_written()
        self._ones = torch.ones(state.members, device=self.device)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the members, row by row."""
        return self.members.tasks

    @property
    def notes(self) -> list[str]:
        """Remarks for the user."""
        return self.members.notes

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler has made something of the step."""
        return self.differentiate != self.gradients

    def as_written(self) -> None:
        """Differentiate and evaluate by the functions of this class, until a compiler makes something of them."""
        self.differentiate, self.infer = self.gradients, self.logits

    def _loss_of_one(self, logits: Tensor) -> Tensor:
        return self.objective.loss(logits, self.graph.y, self.graph.train)

    # ---- one epoch -----------------------------------------------------------------------------------

    def __call__(self) -> None:
        """Train one epoch, evaluate the weights it left and write the outcome down; all in place."""
        self.evaluate(self.train_step())

    def without_evaluation(self) -> None:
        """Train one epoch; only its training losses are written down."""
        self.note(self.train_step())

    def evaluate(self, losses: Tensor) -> None:
        """What follows a step with ``losses [T]``: evaluate the weights it left and write the outcome down."""
        with torch.no_grad():
            measured = self._evaluation(self.infer(self.state.flat))
            self._record(self.state, torch.cat([losses[:, None], measured], 1))
        self.state.steps.add_(1)

    def note(self, losses: Tensor) -> None:
        """What follows a step with ``losses [T]`` that is not evaluated: write them down."""
        self._record.loss_alone(self.state, losses)
        self.state.steps.add_(1)

    def train_step(self) -> Tensor:
        """Forward, loss, backward and update in place; the losses ``[T]``."""
        state = self.state
        losses, grad = self.differentiate(state.flat)
        self._optimizer.update(state.flat, grad, state.moments, state.step)
        return losses

    def gradients(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Losses ``[T]`` at the weights ``flat [T, P]`` and their gradients ``[T, P]``; batch norms take note.

        What is differentiated is their sum, in which each has a slope of 1: a member that is no longer a number does
        not touch its neighbours. The ones are at hand, so neither the sum nor its gradient is computed.
        """
        leaf = flat.detach().requires_grad_()
        losses = self._loss_of_one(self.forward(leaf, training=True))
        (grad,) = torch.autograd.grad(losses, leaf, self._ones)
        return losses.detach(), grad

    def logits(self, flat: Tensor) -> Tensor:
        """What the members say of every node ``[T, N, C]`` with the weights ``flat [T, P]``, as in evaluation."""
        return self.forward(flat, training=False)

    # ---- leaving -------------------------------------------------------------------------------------

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with the members in ``rows`` alone, in new places: a recording of the step is void after this."""
        self.members.keep(rows)
        self._wire(self.state.keep(rows))


def check_alike(tasks: Sequence[Task], multilabel: bool = False) -> None:
    """:class:`CannotStack` unless the steps of ``tasks`` have the same operators."""
    reason = stack_obstacle(tasks, multilabel)
    if reason is not None:
        raise CannotStack(reason)
