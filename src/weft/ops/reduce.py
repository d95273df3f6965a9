"""Reductions over rows: the identity if all rows are on this rank, collectives if they are spread over ranks.

Losses, metrics and norms over nodes go through a :class:`Reduce`. ``dist`` supplies one that communicates; no other
code checks whether a run is distributed.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Reduce(Protocol):
    """Interface of reductions over the rows of all ranks."""

    ranks: int
    first_row: int  # where this rank's rows begin among those of all ranks
    rows: int  # how many they are; -1: all of them

    def sum(self, value: Tensor) -> Tensor:
        """The sum of every rank's ``value``, differentiable."""

    def gather(self, rows: Tensor, dim: int) -> Tensor:
        """Every rank's ``rows`` concatenated along ``dim``, in the order of the ranks; not differentiable."""


class OneRank:
    """All rows are here."""

    ranks, first_row, rows = 1, 0, -1

    def sum(self, value: Tensor) -> Tensor:
        """``value`` itself."""
        return value

    def gather(self, rows: Tensor, dim: int) -> Tensor:
        """``rows`` themselves."""
        return rows


ONE_RANK = OneRank()
