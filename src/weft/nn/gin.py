"""GINConv (Xu, Hu, Leskovec and Jegelka, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft import ops
from weft.nn.checks import check_count
from weft.nn.conv import Conv, aggregates_first, with_identity, without_weights
from weft.nn.epilogue import Ending, Epilogue
from weft.nn.features import Features, own_rows, transform
from weft.nn.initial import Initial, kaiming
from weft.ops import Adjacency


class GINConv(Conv):
    """``Y = act(norm((A + (1 + eps) I) X W_1^T + b_1)) W_2^T + b``.

    ``eps`` is fixed, or learned with ``train_eps=True``; edge weights are ignored. Shapes:
    ``X [N, in_features]``, ``W_1 [hidden, in]`` (weight_in), ``b_1 [hidden]`` (bias_in), ``W_2 [out, hidden]``
    (weight_out), ``b [out]``, ``eps [1]``, ``Y [N, out_features]``; ``hidden`` is out_features unless given.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden: int | None = None,
        norm: str | None = None,
        activation: str = "relu",
        eps: float = 0.0,
        train_eps: bool = False,
        bias: bool = True,
        residual: bool = False,
        constant_input: bool = False,
    ) -> None:
        super().__init__(in_features, out_features)
        self.hidden = out_features if hidden is None else check_count("hidden", hidden)
        self.initial_eps, self.constant_input = float(eps), constant_input
        self.declare("weight_in", (self.hidden, in_features), kaiming(in_features))
        self.declare("bias_in", (self.hidden,), kaiming(in_features))
        self.inner = Epilogue(self.hidden, norm, activation)
        self.declare("weight_out", (out_features, self.hidden), kaiming(self.hidden))
        self.declare("eps", (1,), Initial(self.initial_eps, self.initial_eps) if train_eps else None)
        self.declare_ends(kaiming(self.hidden) if bias else None, residual)

    def propagate(self, x: Features, adj: Adjacency, first: Tensor | None, ending: Ending) -> Tensor:
        """The first product comes before the aggregation if its result is narrower than the input."""
        if first is not None:
            summed = first if self.eps is None else self._weigh_self(first, own_rows(x, adj))
            inner = Ending(self.bias_in, self.inner).linear(summed, self.weight_in)
        elif isinstance(x, Tensor) and aggregates_first(self.in_features, self.hidden, self.constant_input):
            inner = Ending(self.bias_in, self.inner).linear(self._sum(x, adj), self.weight_in)
        else:
            inner = self.inner(self._sum(transform(x, self.weight_in), adj), self.bias_in)
        return ending.linear(inner, self.weight_out)

    def aggregate(self, x: Tensor, adj: Adjacency) -> Tensor:
        """``(A + (1 + eps) I) X``, or ``A X`` if eps is learned, ``[N, in_features]``."""
        return self._sum(x, adj) if self.eps is None else ops.spmm(without_weights(adj), x)

    def _sum(self, x: Tensor, adj: Adjacency) -> Tensor:
        """``(A + (1 + eps) I) x``; with eps fixed at 0 the own row is an extra edge, not an extra pass."""
        if self.eps is None and self.initial_eps == 0.0:
            return ops.spmm(with_identity(adj), x)
        return self._weigh_self(ops.spmm(without_weights(adj), x), own_rows(x, adj))

    def _weigh_self(self, neighbours: Tensor, x: Tensor) -> Tensor:
        if self.eps is None:
            return torch.add(neighbours, x, alpha=1.0 + self.initial_eps)
        return torch.addcmul(neighbours, x, 1.0 + self.eps)

    def extra_repr(self) -> str:
        """The widths and eps."""
        return f"{super().extra_repr()}, eps={'learned' if self.eps is not None else self.initial_eps}"
