"""AttentionConv: what GATConv and GATv2Conv share, namely heads, their joining, and attention dropout."""

from __future__ import annotations

from torch import Tensor

from weft.core.errors import SpecError
from weft.nn.checks import check_count
from weft.nn.conv import Conv
from weft.nn.dropout import Dropout


class AttentionConv(Conv):
    """A convolution with several heads. ``out_features`` is the width of the result in either case:

    ``concat=True`` puts the heads side by side, each ``out_features / heads`` wide; ``concat=False`` averages
    heads that are ``out_features`` wide each. Shapes: H heads, D features of a head.
    """

    def __init__(
        self, in_features: int, out_features: int, heads: int, concat: bool, slope: float, dropout: float
    ) -> None:
        super().__init__(in_features, out_features)
        self.heads, self.concat, self.slope = check_count("heads", heads), concat, float(slope)
        if concat and out_features % heads:
            raise SpecError(
                f"{type(self).__name__}: out_features={out_features} must be a multiple of heads={heads}, "
                "since the heads stand side by side"
            )
        self.head_features = out_features // heads if concat else out_features
        self.dropout = Dropout(dropout)

    @property
    def parts(self) -> int:
        """How many heads stand side by side in the result."""
        return self.heads if self.concat else 1

    def split(self, x: Tensor) -> Tensor:
        """``[..., N, H D]`` to ``[..., N, H, D]``."""
        return x.unflatten(-1, (self.heads, self.head_features))

    def join(self, x: Tensor) -> Tensor:
        """``[..., N, H, D]`` to ``[..., N, out_features]``."""
        if self.concat or self.heads == 1:
            return x.flatten(-2)
        # The gradient of a sum is one row seen by all heads, which the attention's backward reads once, not H times;
        # that of a mean would be written out.
        return x.sum(-2) * (1.0 / self.heads)

    def extra_repr(self) -> str:
        """The widths and the heads."""
        return f"{super().extra_repr()}, heads={self.heads}, concat={self.concat}"
