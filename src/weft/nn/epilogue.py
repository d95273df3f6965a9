"""Epilogue: norm, activation and dropout after a layer. Ending: bias and epilogue fused into its last operator."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from weft import ops
from weft.nn.checks import check_choice
from weft.nn.dropout import Dropout
from weft.nn.norm import Then, make_norm

ACTIVATIONS = ("relu", "elu", "none")


class Epilogue(nn.Module):
    """``y = dropout(act(norm(x + b)))`` for a layer's output ``x [N, F]`` and its bias ``b [F]``.

    This is one operator. A norm is one of its own on a CPU, as a layer norm of over 1,024 features or over the graph,
    and as a batch norm in evaluation mode with gradients. A layer takes an epilogue as an argument and passes its bias
    to it: ``conv(x, adj, epilogue=epilogue)``.
    """

    def __init__(self, features: int, norm: str | None = None, activation: str = "relu", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = make_norm(norm, features)
        self.activation = check_choice("activation", activation, ACTIVATIONS)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, b: Tensor | None = None, parts: int = 1) -> Tensor:
        """``x [N, F]`` and the bias ``b [F]`` that was not added yet, to ``[N, F]``; ``parts``: heads side by side."""
        then = Then(self.activation, *self.dropout.draw_fused(x.device), self.dropout.site, parts)
        out = then(x, b) if self.norm is None else self.norm(x, b, then)
        return self.dropout.drop_after(out, parts)

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation!r}"


@dataclass(frozen=True)
class Ending:
    """``epilogue(out + add, bias)``, or plainly ``out + add + bias`` without an epilogue.

    Shapes: ``bias [O]``, ``add [N, O]`` (a residual). A layer finishes with :meth:`linear` if its last step is a
    product, which fuses everything into the product's pass, and with :meth:`apply` otherwise.
    """

    bias: Tensor | None = None
    epilogue: Epilogue | None = None
    add: Tensor | None = None

    def apply(self, out: Tensor, also: Tensor | None = None, parts: int = 1) -> Tensor:
        """``out [N, O]`` finished; ``also [N, O]`` is added to it. ``parts``: heads side by side in O."""
        add = self._sum(also)
        out = out if add is None else out + add
        if self.epilogue is None:
            return ops.bias_act_dropout(out, self.bias)
        return self.epilogue(out, self.bias, parts)

    def linear(self, x: Tensor, weight: Tensor, also: Tensor | None = None) -> Tensor:
        """``x W^T`` finished, ``x [N, I]``, ``weight [O, I]``; ``also [N, O]`` is added to it."""
        add = self._sum(also)
        if self.epilogue is None:
            return ops.linear(x, weight, self.bias, add=add)
        if self.epilogue.norm is not None:
            return self.epilogue(ops.linear(x, weight, add=add), self.bias)
        rate, clock = self.epilogue.dropout.draw_fused(x.device)
        act, site = self.epilogue.activation, self.epilogue.dropout.site
        out = ops.linear(x, weight, self.bias, add=add, act=act, p=rate, clock=clock, site=site)
        return self.epilogue.dropout.drop_after(out)

    def _sum(self, also: Tensor | None) -> Tensor | None:
        if self.add is None or also is None:
            return also if self.add is None else self.add
        return self.add + also
