"""A group of one task, without lists of one, for tests of training."""

from __future__ import annotations

import torch

from weft.core.decision import Update
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.runtime.group import GroupRun
from weft.runtime.step.state import State


class Alone:
    """One task in training; ``group`` is the group that it is, ``state`` has a leading dimension of 1."""

    def __init__(self, task: Task, graph: Graph, plan: Plan, device: torch.device) -> None:
        self.task, self.plan = task, plan
        self.group = GroupRun([task], graph, plan, device)
        self.columns = self.group.stacks[0].columns

    @property
    def epoch(self) -> int:
        return self.group.epoch

    @property
    def notes(self) -> list[str]:
        return self.group.notes

    @property
    def state(self) -> State:
        return self.group.stacks[0].state

    @property
    def num_parameters(self) -> int:
        return self.group.num_parameters(0)

    def advance(self, epochs: int) -> Update:
        return self.group.advance(epochs)[0]

    def poll(self, first: int = 0) -> Update:
        return self.group.poll(first)[0]

    def best_model(self) -> torch.nn.Module:
        return self.group.best_model(0)
