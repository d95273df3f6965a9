"""SoloRun: one task alive on one device.

It owns the state and advances it; when to look, what to show and when to save is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError, WeftError
from weft.core.plan import Plan
from weft.core.task import MODELS, Task
from weft.graph.features import SparseFeatures
from weft.graph.graph import Graph
from weft.run.buffers import BufferSlots, attach_clock, detach_clock, take_buffers
from weft.run.evaluation import Evaluation
from weft.run.inputs import (
    bind,
    cast_features,
    check_logits,
    first_aggregate,
    row_normalised,
    takes_edge_index,
)
from weft.run.models import build_model
from weft.run.objectives import metric_name, objective_for
from weft.run.optimizers import Optimizer
from weft.run.parameters import Layout, layout_of
from weft.run.precision import DTYPES
from weft.run.randomness import generator_states, restore_generators
from weft.run.replay import Replay
from weft.run.state import State
from weft.run.step import Forward, Step


@dataclass(frozen=True)
class Progress:
    """What the host learns when it looks: the rows of new epochs, the end, and the best so far."""

    first: int  # epoch (from 0) of rows[0]
    rows: list[list[float]]
    end: int
    best_epoch: int
    best_score: float


class SoloRun:
    """A task in training on ``device``, with the graph there; ``notes`` holds remarks for the user."""

    def __init__(self, task: Task, graph: Graph, plan: Plan, device: torch.device) -> None:
        self.task, self.plan, self.device = task, plan, device
        self.notes: list[str] = []
        self.epoch = 0
        self.graph = graph.to(device)
        self.objective = objective_for(task, graph.multilabel)
        self.metric = metric_name(task, graph.multilabel)
        self._model = build_model(task, graph.num_features, graph.num_classes).to(device)
        self._layout: Layout | None = None
        self._forward = self._tried_forward()
        evaluation = Evaluation(self.graph, self.objective, self.metric)
        self.columns = ["loss", *evaluation.columns]
        optimizer = Optimizer(task, self._layout, device)
        self._buffer_slots = BufferSlots(self._model)
        self.state = State.new(
            self._flat, take_buffers(self._model), optimizer.moments, task.seed, task.epochs, len(self.columns)
        )
        self._buffer_slots.fill(self.state.buffers)
        attach_clock(self._model, self.state.clock)
        self._step = Step(
            self._forward, self._loss, optimizer, evaluation, self.state, self._buffer_slots, task.patience
        )
        self._with_evaluation: Replay | None = None
        self._without_evaluation: Replay | None = None

    @property
    def num_parameters(self) -> int:
        """P."""
        return self._layout.total

    # ---- calling the model ---------------------------------------------------------------------------

    def _loss(self, logits: Tensor) -> Tensor:
        return self.objective.loss(logits, self.graph.y, self.graph.train)

    def _tried_forward(self) -> Forward:
        """The model as a function of flat weights, tried once so that misfits show before training."""
        x = row_normalised(self.graph.x) if self.task.feature_norm == "row" else self.graph.x
        x = cast_features(x, DTYPES[self.task.precision])
        sparse = isinstance(x, SparseFeatures)
        if sparse and takes_edge_index(self._model):
            return self._try(x.to_dense())
        try:
            return self._try(x)
        except SpecError as error:
            if not sparse or self.task.model in MODELS or error.__cause__ is None:
                raise
            self.notes.append(f"features made dense: the model does not take sparse ones ({error.__cause__})")
            return self._try(x.to_dense())

    def _try(self, x: Tensor | SparseFeatures) -> Forward:
        first = first_aggregate(self._model, x, self.graph.adj) if self.plan.first_layer == "once" else None
        call = bind(self._model, self.graph, x, first)
        self._model.eval()
        try:
            with torch.no_grad():
                if any(nn.parameter.is_lazy(p) for p in self._model.parameters()):
                    call()  # lazy layers learn their sizes
                forward = self._flatten(call)
                logits = forward(self._flat, training=False)
        except (WeftError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise SpecError(
                f"task {self.task.label!r}: model {self.task.model_name} failed on graph "
                f"{self.graph.name!r}: {type(error).__name__}: {error}"
            ) from error
        check_logits(self.task.label, self._model, logits, self.graph.num_nodes, self.graph.num_classes)
        return forward

    def _flatten(self, call: Callable[[], Tensor]) -> Forward:
        """Lay the model's parameters out in one buffer; a second try finds them where the first put them."""
        if self._layout is None:
            self._layout = layout_of(self._model, self.task.decay)
            self._flat = self._layout.flatten(dict(self._model.named_parameters()))
            if not self._layout.names:
                raise SpecError(f"task {self.task.label!r}: model {self.task.model_name} has no trainable parameters")
        return Forward(self._model, self._layout, call, DTYPES[self.task.precision])

    # ---- advancing -----------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether the step has been prepared (and recorded, where the plan says so)."""
        return self._with_evaluation is not None

    def prepare(self) -> None:
        """Record the step where the plan says so; the state is as before."""
        changed = list(self.state.tensors().values())
        record = self.plan.replay
        self._with_evaluation = Replay(self._step, changed, record=record)
        self._note_failure(self._with_evaluation)
        if self.task.eval_every == 1:
            self._without_evaluation = self._with_evaluation
            return
        record = record and self._with_evaluation.recorded
        self._without_evaluation = Replay(
            self._step.without_evaluation, changed, record=record, pool=self._with_evaluation.pool
        )
        self._note_failure(self._without_evaluation)

    def _note_failure(self, replay: Replay) -> None:
        if replay.reason:
            self.notes.append(f"the step runs eagerly: it could not be recorded ({replay.reason})")

    def advance(self, epochs: int, stop: Callable[[], bool] = bool) -> Progress:
        """Train up to ``epochs`` more epochs, fewer once ``stop()`` says so, and read what happened."""
        if not self.started:
            self.prepare()
        first = self.epoch
        last = min(first + epochs, self.task.epochs)
        while self.epoch < last and not (self.epoch > first and stop()):
            self._one_epoch()
        return self.look(first)

    def _one_epoch(self) -> None:
        self.epoch += 1
        evaluated = self.epoch % self.task.eval_every == 0 or self.epoch == self.task.epochs
        (self._with_evaluation if evaluated else self._without_evaluation)()

    def look(self, first: int = 0) -> Progress:
        """What the device has recorded from epoch ``first`` (counted from 0) on."""
        end = int(self.state.end)
        rows = self.state.history[first : min(self.epoch, end)].tolist()
        return Progress(first, rows, end, int(self.state.best_epoch), float(self.state.best_score))

    # ---- saving and leaving --------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint has to hold."""
        return {**self.state.tensors(), **generator_states(self.device)}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Continue from the ``tensors()`` of an equal task."""
        here = self.state.tensors()
        for name, tensor in here.items():
            if name not in saved or saved[name].shape != tensor.shape:
                found = list(saved[name].shape) if name in saved else "nothing"
                raise SpecError(
                    f"task {self.task.label!r}: the checkpoint holds {found} for {name!r}, but this model "
                    f"needs {list(tensor.shape)}; it was written for another model or graph"
                )
        self.state.restore(saved)
        restore_generators(saved, self.device)
        self.epoch = int(self.state.step)

    def best_model(self) -> nn.Module:
        """The model with the best weights of its own, in evaluation mode. The run is over after this."""
        flat = self.state.best_flat.clone()
        self._forward.slots.fill([nn.Parameter(view.clone()) for view in self._layout.views(flat)])
        self._buffer_slots.fill({name: b.clone() for name, b in self.state.best_buffers.items()})
        detach_clock(self._model)
        return self._model.eval()

    def best_tensors(self) -> dict[str, Tensor]:
        """The best weights and buffers by the names that the model's ``state_dict`` uses."""
        return {**self._layout.named(self.state.best_flat), **self.state.best_buffers}

    def describe(self) -> dict[str, Any]:
        """What is being trained, for the journal."""
        return {
            "parameters": self.num_parameters,
            "metric": self.metric,
            "objective": self.objective.name,
            "precision": self.task.precision,
        }
