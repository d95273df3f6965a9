"""GCNConv (Kipf and Welling, 2017)."""

from __future__ import annotations

from torch import Tensor

from weft import ops
from weft.nn.conv import Conv, aggregates_first
from weft.nn.epilogue import Ending
from weft.nn.features import Features, transform
from weft.nn.initial import ZEROS, glorot
from weft.ops import Adjacency


class GCNConv(Conv):
    """``Y = D^-1/2 (A + I) D^-1/2 X W^T + b`` with D the weighted in-degrees of ``A + I``.

    A self loop that the graph has keeps its weight. Shapes: ``X [N, in_features]``, ``W [out, in]``,
    ``b [out]``, ``Y [N, out_features]``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        residual: bool = False,
        constant_input: bool = False,
    ) -> None:
        super().__init__(in_features, out_features)
        self.constant_input = constant_input
        self.declare("weight", (out_features, in_features), glorot(in_features, out_features))
        self.declare_ends(ZEROS if bias else None, residual)

    def propagate(self, x: Features, adj: Adjacency, first: Tensor | None, ending: Ending) -> Tensor:
        """Aggregate on the narrower side; sparse features are transformed first."""
        widths = self.in_features, self.out_features
        if first is None and isinstance(x, Tensor) and aggregates_first(*widths, self.constant_input):
            first = self.aggregate(x, adj)
        if first is not None:
            return ending.linear(first, self.weight)
        return ending.apply(ops.spmm(adj.gcn(), transform(x, self.weight)))

    def aggregate(self, x: Tensor, adj: Adjacency) -> Tensor:
        """``D^-1/2 (A + I) D^-1/2 X``, ``[N, in_features]``."""
        return ops.spmm(adj.gcn(), x)
