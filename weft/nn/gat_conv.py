"""GATConv (Velickovic et al., 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft import ops
from weft.nn.attention_conv import AttentionConv
from weft.nn.ending import Ending
from weft.nn.initial import ZEROS, glorot
from weft.nn.inputs import Features, transform
from weft.ops import Adjacency


class GATConv(AttentionConv):
    """Attention over the in-neighbours and the node itself, head by head (h left out):

        z_j      = W x_j
        alpha_ij = softmax over j of leaky_relu(<a_src, z_j> + <a_dst, z_i>)
        y_i      = sum over j of dropout(alpha_ij) z_j        heads side by side or averaged, then + b

    Shapes: ``x [N, in_features]``, ``W [H D, in]``, ``attention [2, H, D]`` = (a_src, a_dst), ``b [out]``,
    ``y [N, out_features]``. Edge weights are not looked at.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        heads: int = 1,
        concat: bool = True,
        slope: float = 0.2,
        dropout: float = 0.0,
        bias: bool = True,
        residual: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, heads, concat, slope, dropout)
        width = self.heads * self.head_features
        self.declare("weight", (width, in_features), glorot(in_features, width))
        self.declare("attention", (2, self.heads, self.head_features), glorot(self.heads, self.head_features))
        self.declare_ends(ZEROS if bias else None, residual)

    def propagate(self, x: Features, adj: Adjacency, first: Tensor | None, ending: Ending) -> Tensor:
        """One product for z, one narrow product for all scores, then the fused attention."""
        z = transform(x, self.weight)
        scores, z = ops.linear_and_pass(z, self._score_weight())
        a_src, a_dst = scores.split(self.heads, -1)
        rate, clock = self.dropout.draw(z.device)
        out = ops.graph_attention(
            adj.with_self_loops(), self.split(z), a_src, a_dst, self.slope, rate, clock, self.dropout.site
        )
        return ending.apply(self.join(out))

    def _score_weight(self) -> Tensor:
        """``[2 H, H D]``: row (s, h) holds the s-th attention vector of head h, and zeros for other heads.

        As one product the 2 H scores read z once, and their gradient is a weight gradient over all nodes like
        any other. Multiplying and summing would write two more tensors of z's size, forward and backward.
        """
        blocks = torch.diag_embed(self.attention.transpose(-2, -1), dim1=-3, dim2=-2)
        return blocks.reshape(2 * self.heads, self.heads * self.head_features)
