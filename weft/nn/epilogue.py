"""Epilogue: what stands between two layers, in as few passes over the activations as it can be."""

from __future__ import annotations

from torch import Tensor, nn

from weft import ops
from weft.nn.checks import check_choice
from weft.nn.dropout import Dropout
from weft.nn.norm import make_norm

ACTIVATIONS = ("relu", "elu", "none")


class Epilogue(nn.Module):
    """``y = dropout(act(norm(x + b)))`` for a layer's output ``x [N, F]`` and its bias ``b [F]``.

    Without a norm this is one operator. A layer takes an epilogue as an argument and hands its bias to it:
    ``conv(x, adj, epilogue=epilogue)``.
    """

    def __init__(self, features: int, norm: str | None = None, activation: str = "relu", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = make_norm(norm, features)
        self.activation = check_choice("activation", activation, ACTIVATIONS)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, b: Tensor | None = None, parts: int = 1) -> Tensor:
        """``x [N, F]`` and the bias ``b [F]`` that was not added yet, to ``[N, F]``; ``parts``: heads side by side."""
        if self.norm is not None:
            x, b = self.norm(x, b), None
        rate, clock = self.dropout.draw(x.device)
        return ops.bias_act_dropout(x, b, self.activation, rate, clock, self.dropout.site, parts)

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation!r}"
