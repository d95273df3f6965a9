"""Loss and metric of every split from one set of logits, as a row of numbers on the device.

Shapes: M nodes of all splits together, S splits, ``logits [..., N, C]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.ops.launch.backend import use_triton
from weft.runtime.step.evaluation_triton import Scores
from weft.runtime.step.metrics import METRICS, accuracy, correct
from weft.runtime.step.objectives import Objective

SPLITS = ("train", "val", "test")


class Evaluation:
    """Evaluates the splits that ``graph`` has; ``columns`` names the numbers of a row ``[..., 2 S]``."""

    def __init__(self, graph: Any, objective: Objective, metric: str) -> None:
        self.splits = [name for name in SPLITS if getattr(graph, name).numel()]
        parts = [getattr(graph, name) for name in self.splits]
        self._sizes = [part.numel() for part in parts]
        self._rows = torch.cat(parts)
        self._target = graph.y.index_select(0, self._rows)
        self._targets = self._target.split(self._sizes)
        self._objective, self._metric = objective, METRICS[metric]
        self._scores = None
        if self._metric is accuracy and not graph.multilabel and use_triton(self._rows):
            self._scores = Scores(self._rows, self._target, self._sizes, graph.num_classes)
        self.columns = [f"{split}_loss" for split in self.splits]
        self.columns += [f"{split}_{metric}" for split in self.splits]

    def __call__(self, logits: Tensor) -> Tensor:
        """The row ``[..., 2 S]`` float32: losses of the splits, then their metrics."""
        if self._scores is not None:
            return self._scores(logits)
        chosen = logits.index_select(-2, self._rows).float()
        losses = self._objective.per_row(chosen, self._target)
        if self._metric is accuracy:
            # Both are means over rows: one pass for both, which counts where an epoch is all small kernels.
            values = torch.stack([losses, correct(chosen, self._target)], -2)
            means = [part.mean(-1) for part in values.split(self._sizes, -1)]
            return torch.stack(means, -1).flatten(-2)
        parts = zip(chosen.split(self._sizes, -2), self._targets, strict=True)
        means = [part.mean(-1) for part in losses.split(self._sizes, -1)]
        return torch.stack(means + [self._metric(part, target) for part, target in parts], -1)
