"""StackLoss: the mean training loss of a stack's members, each over the training rows of its split.

Shapes: T members, N nodes, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import SpecError
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.runtime.batches.member_splits import StackSplits
from weft.runtime.batches.source import Batch
from weft.runtime.loop.outputs import logits_and_extra
from weft.runtime.step.objectives import Objective, objective_of_stack


class StackLoss:
    """What the models of ``tasks`` returned and a batch -> losses ``[T]``; over ranks, this rank's part of them.

    ``objective``: of all members; ``objectives``: one per split, or that one if all members have the same split.
    """

    def __init__(
        self, tasks: Sequence[Task], splits: StackSplits, graph: Graph, device: torch.device, ranks: int
    ) -> None:
        self._label, self._splits, self._ranks = tasks[0].label, splits, ranks
        self.objective = objective_of_stack(tasks, graph, device)
        own = [([tasks[place] for place in part.places], part.split.train) for part in splits.parts]
        by_split = [objective_of_stack(some, graph, device, train) for some, train in own]
        self.objectives = by_split or [self.objective]

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """The mean loss ``[T]`` over the batch's rows."""
        if not self._splits.parts:
            return self._by(self.objective, output, batch)
        return self._splits.compute(output, lambda number, own: self._of_split(number, own, batch))

    def _of_split(self, number: int, output: Any, batch: Batch) -> Tensor:
        train = self._splits.parts[number].split.train
        return self._by(self.objectives[number], output, replace(batch, rows=train))

    def _by(self, objective: Objective, output: Any, batch: Batch) -> Tensor:
        if objective.own:
            return objective.loss(output, batch.y, batch.rows)
        logits, extra = logits_and_extra(output, self._label)
        losses = self._of_logits(objective, logits, batch)
        return losses if extra is None else losses + self._checked_extra(extra)

    def _checked_extra(self, extra: Tensor) -> Tensor:
        if self._ranks > 1:
            raise SpecError(
                f"task {self._label!r}: the model returns a loss of its own, which {self._ranks} "
                "ranks cannot share; train it on one rank"
            )
        return extra

    def _of_logits(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        if not batch.rows.numel():  # a rank without training rows still takes part in the backward pass
            return logits.index_select(-2, batch.rows).sum((-2, -1))
        losses = objective.loss(logits, batch.y, batch.rows)
        return losses if self._ranks == 1 else losses * batch.share
