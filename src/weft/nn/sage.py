"""SAGEConv (Hamilton, Ying and Leskovec, 2017)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft import ops
from weft.nn.checks import check_choice
from weft.nn.conv import Conv, aggregates_first, without_weights
from weft.nn.epilogue import Ending
from weft.nn.features import Features, as_dense, keep_own_rows, own_rows, transform, transform_own
from weft.nn.initial import kaiming
from weft.ops import Adjacency

AGGREGATORS = ("mean", "max", "sum")


class SAGEConv(Conv):
    """``y_i = W_n aggregate(x_j for j -> i) + W_s x_i + b`` with the mean, the maximum or the sum.

    A node without in-edges aggregates zeros; edge weights are ignored. Shapes: ``x [N, in_features]``,
    ``W_n`` (weight_neighbour) and ``W_s`` (weight_self) ``[out, in]``, ``b [out]``, ``y [N, out_features]``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        aggregator: str = "mean",
        bias: bool = True,
        residual: bool = False,
        constant_input: bool = False,
    ) -> None:
        super().__init__(in_features, out_features)
        self.aggregator = check_choice("aggregator", aggregator, AGGREGATORS)
        self.constant_input = constant_input
        initial = kaiming(in_features)
        self.declare("weight_neighbour", (out_features, in_features), initial)
        self.declare("weight_self", (out_features, in_features), initial)
        self.declare_ends(initial if bias else None, residual)

    def propagate(self, x: Features, adj: Adjacency, first: Tensor | None, ending: Ending) -> Tensor:
        """One product over both halves if the input is precomputed, else one product per half.

        One product with the two weights side by side would need the result's halves apart again (to aggregate
        one of them), which copies as much as the second reading of ``x`` costs.
        """
        if first is not None:
            return ending.linear(first, torch.cat([self.weight_neighbour, self.weight_self], -1))
        first_aggregates = self.aggregator == "max"  # the maximum does not commute with a linear map
        if not first_aggregates and isinstance(x, Tensor):
            first_aggregates = aggregates_first(self.in_features, self.out_features, self.constant_input)
        if not isinstance(x, Tensor):
            itself = transform_own(x, self.weight_self, adj)
            if first_aggregates:
                return ending.linear(self._reduce(as_dense(x), adj), self.weight_neighbour, itself)
            return ending.apply(self._reduce(transform(x, self.weight_neighbour), adj), itself)
        if adj.num_rows != adj.num_cols:  # a block: the own rows are fewer than the neighbours'
            rows, x = keep_own_rows(x, adj.num_rows)
            if first_aggregates:
                return ending.linear(self._reduce(x, adj), self.weight_neighbour, transform(rows, self.weight_self))
            return ending.linear(rows, self.weight_self, self._reduce(transform(x, self.weight_neighbour), adj))
        if first_aggregates:
            itself, x = ops.linear_keep_input(x, self.weight_self)
            return ending.linear(self._reduce(x, adj), self.weight_neighbour, itself)
        neighbours, x = ops.linear_keep_input(x, self.weight_neighbour)
        return ending.linear(x, self.weight_self, self._reduce(neighbours, adj))

    def aggregate(self, x: Tensor, adj: Adjacency) -> Tensor:
        """The aggregated and the own features side by side, ``[N, 2 in_features]``.

        Side by side they need one product; separately, two and their sum.
        """
        return torch.cat([self._reduce(x, adj), own_rows(x, adj)], -1)

    def _reduce(self, x: Tensor, adj: Adjacency) -> Tensor:
        return ops.spmm(without_weights(adj), x, reduce=self.aggregator)

    def extra_repr(self) -> str:
        """The widths and the aggregator."""
        return f"{super().extra_repr()}, aggregator={self.aggregator!r}"
