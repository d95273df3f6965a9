"""Epilogue: what stands between two layers, in as few passes over the activations as can be."""

from __future__ import annotations

from torch import Tensor, nn

from weft.nn.checks import check_choice
from weft.nn.dropout import Dropout
from weft.nn.norm import Then, make_norm

ACTIVATIONS = ("relu", "elu", "none")


class Epilogue(nn.Module):
    """``y = dropout(act(norm(x + b)))`` for a layer's output ``x [N, F]`` and its bias ``b [F]``.

    This is one operator. A norm is one of its own on a CPU, as a layer norm of over 1,024 features or over the graph,
    and as a batch norm that is evaluated for gradients. A layer takes an epilogue as an argument and hands its bias to
    it: ``conv(x, adj, epilogue=epilogue)``.
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
