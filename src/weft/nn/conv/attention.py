"""AttentionConv: base class of GATConv and GATv2Conv, with heads, their joining, and attention dropout."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from weft import ops
from weft.core.errors import SpecError
from weft.nn.checks import check_count
from weft.nn.conv.conv import Conv
from weft.nn.dropout import Dropout
from weft.nn.epilogue import Ending


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

    def finish(self, x: Tensor, ending: Ending) -> Tensor:
        """``[..., N, H, D]`` to ``[..., N, out_features]``: join the heads, then apply ``ending``."""
        if self.concat or self.heads == 1:
            return ending.apply(x.flatten(-2), parts=self.parts)
        if ending.epilogue is not None:
            return ending.apply(ops.mean_heads(x))
        return replace(ending, bias=None).apply(ops.mean_heads(x, ending.bias))

    def extra_repr(self) -> str:
        """The widths and the heads."""
        return f"{super().extra_repr()}, heads={self.heads}, concat={self.concat}"
