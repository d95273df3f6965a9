"""Draw an item in proportion to its weight, from one class or from all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.graph.generate.counter import below, coin


@dataclass(frozen=True)
class Popularity:
    """M items with integer weights, laid end to end on a line, class after class.

    ``order [M]`` int32 items by class, ``ends [M]`` int64 where each item's stretch of the line ends;
    ``begin [C]``, ``weight [C]`` int64 the stretch of every class; ``total`` the length of the line.
    """

    order: Tensor
    ends: Tensor
    begin: Tensor
    weight: Tensor
    total: int

    @classmethod
    def of(cls, weights: Tensor, classes: Tensor, num_classes: int) -> Popularity:
        """From ``weights [M]`` and ``classes [M]`` (integers)."""
        order = torch.sort(classes, stable=True).indices.to(torch.int32)
        ends = torch.cumsum(weights.index_select(0, order), 0, dtype=torch.int64)
        per_class = torch.zeros(num_classes, dtype=torch.int64, device=weights.device)
        per_class.index_add_(0, classes.to(torch.int64), weights.to(torch.int64))
        begin = torch.cumsum(per_class, 0) - per_class
        return cls(order, ends, begin, per_class, int(per_class.sum()))

    def at(self, position: Tensor) -> Tensor:
        """The item int32 whose stretch covers each position of the line."""
        place = torch.searchsorted(self.ends, position, right=True, out_int32=True)
        return self.order.index_select(0, place)

    def draw(self, bits: Tensor, classes: Tensor, same_side: Tensor) -> Tensor:
        """One item per hash: of the given class when its coin falls under ``same_side [C]``, else of another.

        ``bits`` int64 and ``classes`` int32 are ``[B]``; returns items ``[B]`` int32.
        """
        weight = self.weight.index_select(0, classes)
        same = coin(bits) < same_side.index_select(0, classes)
        # A class without items, or the only class there is, leaves no choice.
        same.logical_and_(weight > 0).logical_or_(weight == self.total)
        position = below(bits, torch.where(same, weight, self.total - weight))
        begin = self.begin.index_select(0, classes)
        beyond = weight.mul_(position >= begin)  # another class: skip over one's own stretch
        return self.at(position.add_(torch.where(same, begin, beyond)))
