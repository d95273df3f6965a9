"""RowBatches: a source that cuts the training rows into k batches over the whole graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from weft.batches.source import Batch, FullGraph, Source, SourceRequest


class RowBatches(FullGraph):
    """``steps`` batches per epoch; the rows of a batch are every ``steps``-th training node."""

    constant = False

    def __init__(self, request: SourceRequest, steps: int) -> None:
        super().__init__(request)
        graph = request.graph
        self.steps_per_epoch = steps
        self.parts = [graph.train[place::steps].contiguous() for place in range(steps)]
        self.asked: list[tuple[int, int]] = []

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        self.asked.append((epoch, first))
        for place, rows in enumerate(self.parts[first:], first):
            share = torch.tensor([rows.numel() / self._graph.train.numel()], device=rows.device)
            about = {"rows": rows, "share": share, "shape": ("rows", rows.numel())}
            whole = self.batch
            yield Batch(whole.x, whole.blocks, whole.y, first=whole.first, **about)
            assert place < self.steps_per_epoch


def row_batches(steps: int) -> Callable[..., Source]:
    """What makes such a source."""
    return lambda request: RowBatches(request, steps)
