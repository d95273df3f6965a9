"""SoloRun: one task alive on one device, which is a group of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.run.group import GroupRun, Progress
from weft.run.objectives import Objective
from weft.run.state import State

__all__ = ["Progress", "SoloRun"]


class SoloRun:
    """A group of one, without lists of one; ``group`` is what it stands for."""

    def __init__(self, task: Task, graph: Graph, plan: Plan, device: torch.device) -> None:
        self.task, self.plan, self.device = task, plan, device
        self.group = GroupRun([task], graph, plan, device)
        self.graph = self.group.graph
        self.columns = self.group.stacks[0].columns
        self.metric = self.group.stacks[0].metric

    @property
    def epoch(self) -> int:
        """Epochs trained."""
        return self.group.epoch

    @property
    def notes(self) -> list[str]:
        """Remarks for the user."""
        return self.group.notes

    @property
    def state(self) -> State:
        """The state, with a leading dimension of 1."""
        return self.group.stacks[0].state

    @property
    def objective(self) -> Objective:
        """What is minimised."""
        return self.group.stacks[0].objective

    @property
    def num_parameters(self) -> int:
        """P."""
        return self.group.num_parameters(0)

    @property
    def started(self) -> bool:
        """Whether the step has been prepared."""
        return self.group.started

    def prepare(self) -> None:
        """Record the step where the plan says so."""
        self.group.prepare()

    def advance(self, epochs: int, stop: Callable[[], bool] = bool) -> Progress:
        """Train up to ``epochs`` more epochs and read what happened."""
        return self.group.advance(epochs, stop)[0]

    def look(self, first: int = 0) -> Progress:
        """What the device has recorded from epoch ``first`` on."""
        return self.group.look(first)[0]

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint has to hold."""
        return self.group.tensors()

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Continue from the ``tensors()`` of an equal task."""
        self.group.restore(saved)

    def best_model(self) -> nn.Module:
        """The model with the best weights, in evaluation mode."""
        return self.group.best_model(0)

    def best_tensors(self) -> dict[str, Tensor]:
        """The best weights and buffers by name."""
        return self.group.best_tensors(0)

    def describe(self) -> dict[str, Any]:
        """What is being trained, for the journal."""
        return self.group.describe(0)
