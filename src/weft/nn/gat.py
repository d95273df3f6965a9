"""GATConv (Velickovic et al., 2018) and GATv2Conv (Brody, Alon and Yahav, 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft import ops
from weft.nn.conv import AttentionConv
from weft.nn.epilogue import Ending
from weft.nn.features import Features, own_rows, transform, transform_own
from weft.nn.initial import ZEROS, glorot, kaiming
from weft.ops import Adjacency


class GATConv(AttentionConv):
    """Attention over the in-neighbours and the node itself, head by head (h left out):

        z_j      = W x_j
        alpha_ij = softmax over j of leaky_relu(<a_src, z_j> + <a_dst, z_i>)
        y_i      = sum over j of dropout(alpha_ij) z_j        heads side by side or averaged, then + b

    Shapes: ``x [N, in_features]``, ``W [H D, in]``, ``attention [2, H, D]`` = (a_src, a_dst), ``b [out]``,
    ``y [N, out_features]``. Edge weights are ignored.
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
        """One product for z and all scores, then the fused attention.

        The scores ``<a, W x>`` are ``<W^T a, x>``: linear in x as z is, so their 2 H rows are part of the
        product and in its gradients. Multiplying and summing z would pass over it twice more each way.
        """
        by_head = self.weight.unflatten(0, (self.heads, self.head_features))
        scores = (self.attention.unsqueeze(-2) @ by_head).flatten(0, -2)  # rows a_src^T W of every head, then a_dst^T W
        packed = transform(x, torch.cat([self.weight, scores]))
        rate, clock = self.dropout.draw(packed.device)
        looped, dropout = adj.with_self_loops(), (rate, clock, self.dropout.site)
        if adj.num_rows == adj.num_cols:
            out = ops.graph_attention_packed(looped, packed, self.heads, self.slope, *dropout)
        else:
            from weft.ops.attention.gat import take_apart

            z, a_src, a_dst = take_apart(packed, self.heads)
            out = ops.graph_attention(looped, z, a_src, own_rows(a_dst, adj), self.slope, *dropout)
        return self.finish(out, ending)


class GATv2Conv(AttentionConv):
    """Attention whose ranking of neighbours depends on the destination, head by head (h left out):

        z_j      = W_src x_j + b_src,   q_i = W_dst x_i + b_dst
        alpha_ij = softmax over j of <a, leaky_relu(z_j + q_i)>
        y_i      = sum over j of dropout(alpha_ij) z_j        heads side by side or averaged, then + b

    j runs over the in-neighbours and i itself. ``share_weights=True`` takes ``q = z``. Shapes:
    ``x [N, in_features]``, ``W_src, W_dst [H D, in]``, ``b_src, b_dst [H D]``, ``attention [H, D]``,
    ``b [out]``, ``y [N, out_features]``. Edge weights are ignored.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        heads: int = 1,
        concat: bool = True,
        slope: float = 0.2,
        dropout: float = 0.0,
        share_weights: bool = False,
        bias: bool = True,
        residual: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, heads, concat, slope, dropout)
        width = self.heads * self.head_features
        self.share_weights = share_weights
        for end in ("src",) if share_weights else ("src", "dst"):
            self.declare(f"weight_{end}", (width, in_features), glorot(in_features, width))
            self.declare(f"bias_{end}", (width,), kaiming(in_features) if bias else None)
        self.declare("attention", (self.heads, self.head_features), glorot(self.heads, self.head_features))
        self.declare_ends(ZEROS if bias else None, residual)

    def propagate(self, x: Features, adj: Adjacency, first: Tensor | None, ending: Ending) -> Tensor:
        """Two products (the halves of one product would have to be copied), then the fused attention."""
        z = transform(x, self.weight_src, self.bias_src)
        if self.share_weights:
            q = own_rows(z, adj)
        else:
            q = transform_own(x, self.weight_dst, adj, self.bias_dst)
        rate, clock = self.dropout.draw(z.device)
        out = ops.graph_attention_v2(
            adj.with_self_loops(),
            self.split(z),
            self.split(q),
            self.attention,
            self.slope,
            rate,
            clock,
            self.dropout.site,
        )
        return self.finish(out, ending)
