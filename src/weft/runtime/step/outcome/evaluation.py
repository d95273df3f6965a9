"""Loss and metric of every split from one set of logits, as a row of numbers on the device.

Shapes: M nodes of all splits together, S splits, ``logits [..., N, C]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core.errors import SpecError
from weft.ops.launch.backend import use_triton
from weft.runtime.batches.member_splits import OnSplit
from weft.runtime.batches.source import SPLITS, Source
from weft.runtime.loop.functions import OwnMeasure
from weft.runtime.loop.outputs import first_tensor, kind_of, logits_and_extra
from weft.runtime.step.objectives import Objective
from weft.runtime.step.outcome.evaluation_triton import Scores
from weft.runtime.step.outcome.metrics import METRICS, accuracy, correct


class Evaluation:
    """Evaluates the splits that ``source`` has; ``columns`` names the numbers of a row ``[..., 2 S]``.

    ``own_metric``: a metric of the user's own, by the name ``metric``.
    """

    def __init__(
        self,
        source: Source | OnSplit,
        objective: Objective,
        metric: str,
        classes: int,
        multilabel: bool,
        own_metric: OwnMeasure | None = None,
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
        self.objective, self._own_metric, self._label = objective, own_metric, metric
        self._metric = METRICS["accuracy" if own_metric is not None else metric]
        if not self._plain:
            self._whole_labels, self._by_split = source.labels(), [listed[name] for name in self.splits]
        self._scores = None
        one_rank = self._reduce.ranks == 1
        if self._metric is accuracy and not multilabel and use_triton(self._rows) and one_rank and self._plain:
            self._scores = Scores(self._rows, self._target, self._sizes, classes)
        self.columns = [f"{split}_loss" for split in self.splits]
        self.columns += [f"{split}_{metric}" for split in self.splits]

    @property
    def _plain(self) -> bool:
        """Whether loss and metric are Weft's own, and the loss of a split is a mean over its rows."""
        return self.objective.per_row is not None and self._own_metric is None

    def _open(self, output: Any) -> Tensor:
        """The row by calling objective and metric for the rows of every split."""
        losses = [self._loss(output, rows) for rows in self._by_split]
        return torch.stack(losses + [self._score(output, rows) for rows in self._by_split], -1)

    def _loss(self, output: Any, rows: Tensor) -> Tensor:
        given = output if self.objective.own else logits_and_extra(output)[0]
        return self.objective.loss(given, self._whole_labels, rows).float()

    def _score(self, output: Any, rows: Tensor) -> Tensor:
        if self._own_metric is not None:
            return self._own_metric(output, self._whole_labels, rows)
        logits = first_tensor(output)
        if logits is None or logits.dim() != 3:
            raise SpecError(
                f"metric={self._label!r} needs logits; the model returned {kind_of(output)}: give metric= "
                "a function of your own"
            )
        return self._metric(logits.index_select(-2, rows).float(), self._whole_labels.index_select(0, rows))

    def _whole(self, values: Tensor, dim: int) -> Tensor:
        """The rows of all ranks, split by split; ``values`` has those of this rank in the same order."""
        if self._reduce.ranks == 1:
            return values
        return torch.cat([self._reduce.gather(part, dim) for part in values.split(self._own_sizes, dim)], dim)

    def __call__(self, logits: Any) -> Tensor:
        """The row ``[..., 2 S]`` float32: losses of the splits, then their metrics."""
        if self._scores is not None:
            return self._scores(logits)
        if not self._plain:
            return self._open(logits)
        chosen = self._whole(logits.index_select(-2, self._rows).float(), -2)
        assert self.objective.per_row is not None
        losses = self.objective.per_row(chosen, self._target)
        if self._metric is accuracy:
            # Both are means over rows: one pass for both, which counts where an epoch is all small kernels.
            values = torch.stack([losses, correct(chosen, self._target)], -2)
            means = [part.mean(-1) for part in values.split(self._sizes, -1)]
            return torch.stack(means, -1).flatten(-2)
        parts = zip(chosen.split(self._sizes, -2), self._targets, strict=True)
        means = [part.mean(-1) for part in losses.split(self._sizes, -1)]
        return torch.stack(means + [self._metric(part, target) for part, target in parts], -1)
