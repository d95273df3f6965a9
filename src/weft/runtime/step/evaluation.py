"""Loss and metric of every split from one set of logits, as a row of numbers on the device.

Shapes: M nodes of all splits together, S splits, ``logits [..., N, C]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.launch.backend import use_triton
from weft.runtime.batches.member_splits import OnSplit
from weft.runtime.batches.source import SPLITS, Source
from weft.runtime.step.evaluation_triton import Scores
from weft.runtime.step.metrics import METRICS, accuracy, correct
from weft.runtime.step.objectives import Objective


class Evaluation:
    """Evaluates the splits that ``source`` has; ``columns`` names the numbers of a row ``[..., 2 S]``."""

    def __init__(
        self, source: Source | OnSplit, objective: Objective, metric: str, classes: int, multilabel: bool
    ) -> None:
        listed = {name: source.rows(name) for name in SPLITS}
        self._reduce = source.reduce
        sizes = {name: self._reduce.gather(rows, 0).numel() for name, rows in listed.items()}
        self.splits = [name for name in SPLITS if sizes[name]]
        self._sizes = [sizes[name] for name in self.splits]
        self._rows = torch.cat([listed[name] for name in self.splits])
        self._own_sizes = [listed[name].numel() for name in self.splits]
        target = source.labels().index_select(0, self._rows)
        self._target = self._whole(target, 0)
        self._targets = self._target.split(self._sizes)
        self._objective, self._metric = objective, METRICS[metric]
        self._scores = None
        one_rank = self._reduce.ranks == 1
        if self._metric is accuracy and not multilabel and use_triton(self._rows) and one_rank:
            self._scores = Scores(self._rows, self._target, self._sizes, classes)
        self.columns = [f"{split}_loss" for split in self.splits]
        self.columns += [f"{split}_{metric}" for split in self.splits]

    def _whole(self, values: Tensor, dim: int) -> Tensor:
        """The rows of all ranks, split by split; ``values`` has those of this rank in the same order."""
        if self._reduce.ranks == 1:
            return values
        return torch.cat([self._reduce.gather(part, dim) for part in values.split(self._own_sizes, dim)], dim)

    def __call__(self, logits: Tensor) -> Tensor:
        """The row ``[..., 2 S]`` float32: losses of the splits, then their metrics."""
        if self._scores is not None:
            return self._scores(logits)
        chosen = self._whole(logits.index_select(-2, self._rows).float(), -2)
        losses = self._objective.per_row(chosen, self._target)
        if self._metric is accuracy:
            # Both are means over rows: one pass for both, which counts where an epoch is all small kernels.
            values = torch.stack([losses, correct(chosen, self._target)], -2)
            means = [part.mean(-1) for part in values.split(self._sizes, -1)]
            return torch.stack(means, -1).flatten(-2)
        parts = zip(chosen.split(self._sizes, -2), self._targets, strict=True)
        means = [part.mean(-1) for part in losses.split(self._sizes, -1)]
        return torch.stack(means + [self._metric(part, target) for part, target in parts], -1)
