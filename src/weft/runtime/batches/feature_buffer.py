"""FeatureBuffer: memory for the features of captured batches, in which rows that no node has are always zeros.

Batches differ in size, so a larger one leaves rows behind. Nothing aggregates them, but attention shifts its scores by
a bound over all rows: with zeros there, a step depends on its batch alone and not on what was in the buffer before.

Shapes: M rows of a padded batch, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.flow.features.feature_store import FeatureStore
from weft.ops.sampling.gather_rows_triton import clear_rows_triton


class FeatureBuffer:
    """``rows`` rows as wide as those of ``x``; ``filled [1]``: rows from there on are zeros."""

    def __init__(self, rows: int, x: Tensor, device: torch.device) -> None:
        self.rows = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=device)
        self.filled = torch.zeros(1, dtype=torch.int32, device=device)

    def read(self, store: FeatureStore, nodes: Tensor, count: Tensor, beside: bool = False) -> Tensor:
        """The features ``[M, F]`` of the first ``count [1]`` of ``nodes [M]``, zeros behind them; nothing is read back.

        ``beside``: other work runs on the device at the same time.
        """
        found = store.read_padded(nodes, count, self.rows[: nodes.numel()], beside=beside)
        clear_rows_triton(found, count, self.filled)
        return found
