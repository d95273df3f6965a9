"""Stack: train tasks whose steps differ only in numbers as one step with a leading dimension.

Members may differ in seed, rates, decay, schedule, epochs, patience, dropout, label smoothing, initial weights, and
in width, which is padded with zeros (see :mod:`weft.runtime.step.members`).

A step never reads a number back to the host: rates come from a table by the step's own counter, dropout from
clocks, and the best weights and the end of training are found by comparisons on the device. So the same code
runs eagerly on a CPU, and on a GPU an epoch with its evaluation is captured once as a CUDA graph and replayed: one
launch per epoch, and the host looks at the records about every 0.2 s.

Shapes: T members, P parameters, N nodes, C classes, L epochs, M columns of history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.source import Batch, OnSplit, Source, StackSplits
from weft.core.compatibility import deciding_column, eager_reason, metric_name, stack_obstacle
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.runtime.device.process import same_draws
from weft.runtime.modules.state import ModuleState
from weft.runtime.step.evaluation import Bookkeeper, Evaluation
from weft.runtime.step.forward import Loss
from weft.runtime.step.inputs import Inputs, bind
from weft.runtime.step.losses import (
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
from weft.runtime.step.optimizers import SAVED, Optimizer, Plateau, TorchOptimizer
from weft.runtime.step.preflight import Preflight
from weft.runtime.step.state import GRADIENT_NORM, State, write_row


class Stack:
    """T tasks in training on ``inputs.device``.

    ``first_once``: compute the first layer's aggregation of the features before training, if the model offers it.
    ``length``: rows of history and of the table of rates, at least the most epochs of a member. ``eager``: why the
    step is never captured, None if it may be. ``compiled``: functions that replace :meth:`gradients` and
    :meth:`logits`. Raises :class:`CannotStack` for tasks that have to train separately.
    """

    def __init__(self, tasks: Sequence[Task], inputs: Inputs, *, first_once: bool = False, length: int = 0) -> None:
        obstacle = stack_obstacle(tasks, inputs.graph.multilabel)
        if obstacle is not None:
            raise CannotStack(obstacle)
        self.graph, self.device = inputs.graph, inputs.device
        self._length = max([length, *(task.epochs for task in tasks)])
        self.metric = metric_name(tasks[0], self.graph.multilabel, self.graph.regression)
        self._common_objective = objective_of_stack(tasks, self.graph, self.device)
        check_metric(tasks[0], self.metric, self.graph)
        self._own_metric = OwnMeasure(tasks[0], "metric") if tasks[0].has_own("metric") else None
        self.members = Members(tasks, inputs, first_once)
        mean_of_rows = self._common_objective.per_row is not None
        check_ranks(tasks[0], mean_of_rows, self._own_metric is not None, self.source.reduce.ranks)
        self._make_evaluations()
        self.columns = ["loss", *self._evaluations[0].columns]
        flat, buffers = self.members.initial
        del self.members.initial
        self._torch_optimizer: TorchOptimizer | None = None
        self.eager: str | None = eager_reason(tasks[0])
        self.best_state: ModuleState | None = None  # a user's module when its best weights were evaluated
        self.best_copy: nn.Module | None = None  # the same as a copy, if not all of its state is plain data
        self.use_state(State.new(tasks, flat, buffers, len(self.columns), self._length))
        copy_context().run(Preflight(self.members, self.state, self._loss_of))  # context variables stay as they are
        if tasks[0].keep_top is not None and self.members.findings.hidden_state is not None:
            raise SpecError(
                f"task {tasks[0].label!r}: keep_top keeps weights and buffers alone; model {tasks[0].model_name}: "
                f"{self.members.findings.hidden_state}; leave keep_top out"
            )
        self._without = self.members.findings.without_gradient  # parameters, in the last step
        if self.members.findings.without_gradient or self.members.findings.sparse:
            self.use_state(self.state)  # no decay where torch would skip the update
        if self._torch_optimizer is not None and self.device.type != "meta":
            self._torch_optimizer.try_step(self.members.findings.sparse)
        self._try_functions()

    def _make_evaluations(self) -> None:
        """One evaluation, or one per split if the graph has several."""
        graph, source = self.graph, self.members.source
        self._splits = StackSplits(self.tasks, graph, self.device)
        sources = [OnSplit(source, part.split) for part in self._splits.parts] or [source]
        self._evaluations = [
            Evaluation(each, self._common_objective, self.metric, graph.num_classes, graph.multilabel, self._own_metric)
            for each in sources
        ]
        if any(evaluation.columns != self._evaluations[0].columns for evaluation in self._evaluations):
            raise CannotStack("some of their splits have no nodes of a part that others have")

    def use_state(self, state: State) -> None:
        """Train on the tensors of ``state`` with the numbers of the tasks; before a step is captured."""
        self.state, tasks, device = state, self.tasks, self.device
        self._loss = StackLoss(tasks, self._splits, self.graph, device, self.source.reduce.ranks)
        self.objective = self._loss.objective  # of all members
        for evaluation, objective in zip(self._evaluations, self._loss.objectives, strict=True):
            evaluation.objective = objective
        rates, findings, layout = [task.lr for task in tasks], self.members.findings, self.members.layout
        if tasks[0].has_own("optimizer") or findings.sparse or layout.other_kinds:
            self._use_torchs()
        if self._torch_optimizer is not None:
            rates = [self._torch_optimizer.first_rate]
        else:
            self.optimizer = self._optimizer_of(tasks)
        watched = [deciding_column(task, self.metric, self.columns) for task in tasks]
        self._book = Bookkeeper(tasks, 1 + len(self._evaluations[0].splits), watched, device, self.metric)
        self._plateau = Plateau(tasks, self.columns, rates, device) if tasks[0].schedule == "plateau" else None
        self.forward = self.members.forward
        self.members.attach(state)
        self.compiled: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._ones = torch.ones(state.members, device=device)

    def _optimizer_of(self, tasks: Sequence[Task]) -> Optimizer:
        """Weft's own, without decay of parameters that the loss does not depend on."""
        layout, unused = self.members.layout, self.members.findings.without_gradient
        pairs = zip(layout.names, layout.decayed, strict=True)
        layout = replace(layout, decayed=tuple(old and name not in unused for name, old in pairs))
        return Optimizer(tasks, layout, self._length, self.device, self.source.steps_per_epoch)

    @property
    def keeps(self) -> str | None:
        """What a row keeps besides its tensors, so that no other task can begin in them; None if nothing."""
        findings = self.members.findings
        if self._torch_optimizer is not None:
            return f"{self._torch_optimizer.name} of torch keeps numbers in Python"
        if findings.hidden_state is not None:
            return findings.hidden_state
        if findings.unread:
            return f"it changes {min(findings.unread)!r} from call to call, which is no buffer"
        if findings.branches and self.state.members == 1:  # several would fail at what differs among them
            return "it reads numbers into Python, and may keep something in a later step"
        return "it changes its own weights when called" if findings.writes else None

    def fill(self, row: int, task: Task, parent: tuple[Stack, int] | None = None) -> None:
        """Let ``task`` train in ``row``, in the tensors that are there: a captured step stays valid.

        ``parent``: the stack and row whose state it continues with, weights, moments, buffers and history; its seed is
        its own. :class:`CannotStack` if that cannot be, with the reason.
        """
        if self.keeps is not None:
            raise CannotStack(self.keeps)
        slot, flat, buffers = self.members.row_of(task, self.state.buffers)
        fresh = State.new([task], flat, buffers, len(self.columns), self._length).tensors()
        source = {} if parent is None else {n: tensor[parent[1]] for n, tensor in parent[0].state.tensors().items()}
        for name, tensor in self.state.tensors().items():
            tensor[row].copy_(fresh[name][0] if parent is None or name == "end" else source[name])
        self.best_state = None if parent is None else parent[0].best_state
        self.state.clock[row, 0] = task.seed
        self.members.slots[row] = slot
        self.forward.fill(row, slot.rates)
        self.optimizer.fill(row, self._optimizer_of([task]))
        self._book.fill(row, task, deciding_column(task, self.metric, self.columns))
        if self._plateau is not None:
            write_row(self._plateau, row, Plateau([task], self.columns, [task.lr], self.device))
        for objective in (self.objective, *self._loss.objectives):
            if objective.smoothing is not None:
                objective.smoothing[row] = task.label_smoothing

    def _use_torchs(self) -> TorchOptimizer:
        """Update the weights by an optimizer of torch's from now on; it is made once: it keeps what it has learnt."""
        if self._torch_optimizer is None:
            (task,), members, steps = self.tasks, self.members, self.source.steps_per_epoch
            self._torch_optimizer = TorchOptimizer(task, members.layout, members.model, self.state.flat, steps)
            self.eager = self.eager or f"{self._torch_optimizer.name} of torch keeps numbers in Python"
        self.optimizer = self._torch_optimizer
        return self._torch_optimizer

    def restore_optimizer(self, saved: Mapping[str, Tensor]) -> None:
        """Continue with the optimizer of a checkpoint."""
        if SAVED in saved or self._torch_optimizer is not None:
            self._use_torchs().restore(saved)

    def _try_functions(self) -> None:
        """Call users' own objective and metric before the first epoch, so that errors show; see what they do."""
        task, state = self.tasks[0], self.state
        if not self.objective.own and self._own_metric is None:
            return
        if not self.source.constant and not self.members.plain_output:
            raise SpecError(
                f"task {task.label!r}: model {task.model_name} returns more than one tensor, which "
                "sampled training cannot put together from batches; train it with mode='full'"
            )
        batch = self.source.example()
        with same_draws(self.device):
            if self.members.findings.hidden_state is not None:  # a module that keeps something is called as a copy
                own = {name: buffer[0] for name, buffer in state.buffers.items()}
                model = self.members.model_of(self.members.slots[0], state.flat[0], own, as_written=False)
                with torch.no_grad():
                    output = evaluated = with_member(bind(model)(batch))
            else:
                before = state.snapshot()
                output = self.forward(state.flat, training=True, batch=batch)
                state.restore(before)
                with torch.no_grad():
                    evaluated = self.logits(state.evaluated, batch)

            def measured() -> Tensor:
                """Training losses, and a row of an evaluation if a batch is the whole graph, in one tensor."""
                losses = self._loss(output, self.source.example())
                if not self.source.constant:
                    return losses.detach()
                with torch.no_grad():
                    return torch.cat([losses[:, None], self._evaluated(evaluated)], 1)

            if self.objective.own:
                check_reads_output_alone(lambda output: self._loss(output, batch), output, task)
            reason = try_measures(measured, task, self.device)
        if reason is not None and state.members > 1:
            raise CannotStack(reason)
        self.eager = self.eager or reason

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the members, row by row."""
        return tuple(slot.task for slot in self.members.slots)

    @property
    def source(self) -> Source:
        """Where its batches come from."""
        return self.members.source

    def _loss_of(self, rows: Sequence[int]) -> Loss:
        """The loss of some members alone."""
        tasks = [self.tasks[row] for row in rows]
        splits = StackSplits(tasks, self.graph, self.device)
        return StackLoss(tasks, splits, self.graph, self.device, self.source.reduce.ranks)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the members in ``rows``, in new tensors: a CUDA graph of the step is invalid after this."""
        self.members.slots = [self.members.slots[row] for row in rows]
        if self._splits.parts:
            self._make_evaluations()
        self.use_state(self.state.select(rows))

    # ---- one epoch -----------------------------------------------------------------------------------

    def epoch(self, evaluated: bool) -> None:
        """One epoch of a constant source: train, and record the outcome with an evaluation or without."""
        self.record(self.train_step(self.source.example()), evaluated)

    def train_on(self, batch: Batch, own: tuple[Tensor, Tensor] | None = None) -> None:
        """One of several steps of an epoch: train, and count the step and its part of the epoch's loss.

        ``own``: what :meth:`own_gradients` gave, if they are there already.
        """
        losses = self.train_step(batch, own)
        self.state.epoch_loss.add_(losses * (batch.share if batch.of_epoch is None else batch.of_epoch))
        self.state.steps.add_(1)

    def end_epoch(self, evaluated: bool) -> None:
        """After the last of several steps: record the epoch's mean loss, with an evaluation or without."""
        losses = self.state.epoch_loss.clone()
        self.state.epoch_loss.zero_()
        self.record(losses, evaluated, steps=0)

    def train_step(self, batch: Batch, own: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Forward, loss, backward and update in place; the losses ``[T]``."""
        if own is not None:
            losses, grad = self._summed(*own)
        else:
            losses, grad = (self.gradients if self.compiled is None else self.compiled[0])(self.state.flat, batch)
        before, self._without = self._without, self.forward.without_gradient
        if self._without != before and self._torch_optimizer is None:
            self._use_torchs().take_over(self.state, before)
            changed = ", ".join(sorted({*self._without} ^ {*before}))
            self.members.note_once(
                f"{changed} had a gradient in some steps and none in others: torch's {self.tasks[0].optimizer}, which "
                "skips such an update, does the updates"
            )
        if GRADIENT_NORM in self.state.extras:  # always: a captured step does not know whether a callback will read it
            self.state.extras[GRADIENT_NORM].copy_(torch.linalg.vector_norm(grad, dim=-1))
        if self._torch_optimizer is None:
            self.optimizer.update(self.state, grad)
        else:
            self._torch_optimizer.update(self.state, grad, self.forward.grads(grad[0]))
        return losses

    def record(self, losses: Tensor, evaluated: bool, steps: int = 1) -> None:
        """End an epoch with ``losses [T]``: evaluate the weights if ``evaluated``, record the outcome, count steps."""
        state = self.state
        if not evaluated:
            self._book.loss_alone(state, losses, steps)
            return
        # A GPU captures the step of a module whose calls do not depend on earlier ones. To read its attributes, which
        # affect no result, would make the host wait for the device.
        reads = self.members.findings.hidden_state is not None or state.flat.device.type != "cuda"
        module_state, copy = self.members.module_state() if reads else None, None
        # An evaluation may change buffers: the best weights go with those that they were evaluated with.
        changed = state.buffers if self.members.findings.changed_in_evaluation else {}
        before = {name: buffer.clone() for name, buffer in changed.items()}
        if self.members.findings.unsaved:
            own = {name: buffer[0] for name, buffer in state.buffers.items()}
            copy = self.members.model_of(self.members.slots[0], state.evaluated[0], own)
        with torch.no_grad():
            logits = self.source.logits(lambda batch: self.infer(state.evaluated, batch), self.members.layers)
            rows = torch.cat([losses[:, None], self._evaluated(logits)], 1)
            if self._plateau is not None:
                self._plateau(state.extras, rows, state.epoch)
            epoch = 0 if module_state is None else int(state.first_epoch)
            after = {name: buffer.clone() for name, buffer in changed.items()}
            for name, buffer in before.items():
                state.buffers[name].copy_(buffer)
            self._book(state, rows, steps)
            for name, buffer in after.items():
                state.buffers[name].copy_(buffer)
            if module_state is not None and int(state.best_epoch[0]) == epoch:
                self.best_state, self.best_copy = module_state, copy

    def _evaluated(self, logits: Any) -> Tensor:
        """The row of every member's evaluation."""
        if not self._splits.parts:
            return self._evaluations[0](logits)
        return self._splits.compute(logits, lambda number, part: self._evaluations[number](part))

    def gradients(self, flat: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses ``[T]`` at the weights ``flat [T, P]`` and their gradients ``[T, P]``; batch norms are updated."""
        return self._summed(*self.forward.gradients(flat, batch, self._loss, self._ones))

    def own_gradients(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses and gradients at the current weights, of this rank's rows alone: no rank waits for another."""
        return self.forward.gradients(self.state.flat, batch, self._loss, self._ones)

    def _summed(self, losses: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        if self.source.reduce.ranks == 1:
            return losses, gradients
        summed = self.source.reduce.sum(torch.cat([losses[:, None], gradients], 1))  # over ranks, in one collective
        return summed[:, 0], summed[:, 1:].contiguous()

    @property
    def infer(self) -> Callable[[Tensor, Batch], Any]:
        """What computes logits: :meth:`logits`, or what was compiled of it."""
        return self.logits if self.compiled is None else self.compiled[1]

    def logits(self, flat: Tensor, batch: Batch) -> Tensor:
        """The members' logits for the rows of a batch ``[T, N, C]`` with the weights ``flat [T, P]``.

        For an objective of the user's own, whatever the model returns.
        """
        output = self.forward(flat, training=False, batch=batch)
        return output if self.objective.own or isinstance(output, Tensor) else logits_and_extra(output)[0]

    @contextmanager
    def as_function(self) -> Iterator[None]:
        """Inside, the model is a function of the weights that it receives, as a trace needs it."""
        own, members = self.forward, self.members
        members.forward = self.forward = members.forward_of(members.model, alone=False)
        members.attach(self.state)
        try:
            yield
        finally:
            members.forward = self.forward = own
            members.attach(self.state)
