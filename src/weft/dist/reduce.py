"""Reduce over ranks: sums and concatenations of rows that are spread over processes.

A sum gathers every rank's part and adds them in the order of the ranks, so that it has the same bits on every rank and
in every run, whatever the transport does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.dist.exchange import Collective
from weft.dist.ranks import Ranks


class RankReduce:
    """A :class:`weft.ops.reduce.Reduce` over torch.distributed; this rank has ``rows`` rows from ``first_row`` on."""

    def __init__(self, ranks: Ranks, first_row: int, rows: int) -> None:
        self._ranks, self.ranks, self.first_row, self.rows = ranks, ranks.ranks, first_row, rows

    def sum(self, value: Tensor) -> Tensor:
        """The sum of every rank's ``value``; what ranks compute from it adds up, so gradients are summed in turn."""

        def add_up(here: Tensor) -> Tensor:
            total, *rest = self._ranks.all_gather(here)  # in the order of the ranks
            for part in rest:
                total = total + part
            return total

        return Collective.apply(value, add_up, self.sum)

    def gather(self, rows: Tensor, dim: int) -> Tensor:
        """Every rank's ``rows`` concatenated along ``dim``; they may differ in number."""
        dim %= rows.dim()
        sizes = [int(count) for count in self._ranks.all_gather(torch.tensor([rows.shape[dim]]))]
        missing = rows.new_zeros(*rows.shape[:dim], max(sizes) - rows.shape[dim], *rows.shape[dim + 1 :])
        parts = self._ranks.all_gather(torch.cat([rows.detach(), missing], dim))
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)
