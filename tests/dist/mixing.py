"""Users' modules for ranks: right ones, and some whose numbers depend on which nodes a rank has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft


class Plain(nn.Module):
    """A layer of Weft's, norms over all nodes, dropout and a dense layer."""

    def __init__(self, in_features: int, out_features: int, hidden: int = 8) -> None:
        super().__init__()
        self.conv, self.norm, self.out = (
            weft.nn.SAGEConv(in_features, hidden),
            weft.nn.BatchNorm(hidden),
            nn.Linear(hidden, hidden),
        )
        self.last = nn.Linear(hidden, out_features)
        self.gate = nn.Parameter(torch.zeros(()))

    def mixed(self, h: Tensor) -> Tensor:
        """What a subclass makes of the rows."""
        return F.layer_norm(h, h.shape[-1:])

    def forward(self, x: Tensor, adj: Any) -> Tensor:
        h = self.norm(torch.tanh(self.conv(x, adj)))
        return self.last(F.dropout(self.mixed(self.out(h)), 0.3, self.training))


class Mean(Plain):
    def mixed(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


class GatedVirtualNode(Plain):
    """The gate is zero at first, so that only its gradient tells."""

    def mixed(self, h: Tensor) -> Tensor:
        return h + self.gate * h.sum(0, keepdim=True)


class PairNorm(Plain):
    def mixed(self, h: Tensor) -> Tensor:
        h = h - h.mean(0, keepdim=True)
        return h / (h.square().sum(1).mean() + 1e-5).sqrt()


class InstanceNorm(Plain):
    def mixed(self, h: Tensor) -> Tensor:
        return F.instance_norm(h.t()[None])[0].t()


class SoftmaxOverNodes(Plain):
    def mixed(self, h: Tensor) -> Tensor:
        return h * h.softmax(0)


class Cumsum(Plain):
    def mixed(self, h: Tensor) -> Tensor:
        return h + h.cumsum(0)


class Positions(Plain):
    def __init__(self, in_features: int, out_features: int, hidden: int = 8) -> None:
        super().__init__(in_features, out_features, hidden)
        self.table = nn.Embedding(4096, hidden)

    def mixed(self, h: Tensor) -> Tensor:
        return h + self.table(torch.arange(h.shape[0]))


class OnlyInEvaluation(Plain):
    def mixed(self, h: Tensor) -> Tensor:
        return h if self.training else h - h.mean(0)


class ALittleInEvaluation(Plain):
    """Logits move by some thousandths, the same for all nodes of a rank."""

    def mixed(self, h: Tensor) -> Tensor:
        return h if self.training else h - 0.3 * h.relu().mean(0)


class Noise(Plain):
    def mixed(self, h: Tensor) -> Tensor:
        return h + torch.randn(h.shape[0], 1)


class Later(Plain):
    """It mixes rows from the sixth step on."""

    def __init__(self, in_features: int, out_features: int, hidden: int = 8) -> None:
        super().__init__(in_features, out_features, hidden)
        self.calls = 0

    def mixed(self, h: Tensor) -> Tensor:
        self.calls += self.training
        return h - h.mean(0) if self.calls > 5 else h


class OverBlocks(nn.Module):
    """For sampled training: a layer per block."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.first, self.last = weft.nn.SAGEConv(in_features, 8), weft.nn.SAGEConv(8, out_features)
        self.norm = weft.nn.LayerNorm(8)

    def mixed(self, h: Tensor) -> Tensor:
        """What a subclass makes of the rows."""
        return self.norm(h)

    def forward(self, x: Tensor, blocks: Any) -> Tensor:
        first, last = blocks if isinstance(blocks, tuple) else (blocks, blocks)
        return self.last(self.mixed(torch.tanh(self.first(x, first))), last)


class Deep(nn.Module):
    """For sampled training with one subgraph for all layers, of which it has more than the sampler has hops."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.first, self.second = weft.nn.GCNConv(in_features, 8), weft.nn.GATConv(8, 8, heads=2)
        self.third, self.last = weft.nn.SAGEConv(8, 8), weft.nn.GINConv(8, out_features)

    def forward(self, x: Tensor, adj: Any) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x, adj)), adj))
        return self.last(torch.tanh(self.third(h, adj)), adj)


class NormOverGraph(OverBlocks):
    """A layer norm over all nodes at once."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.norm = weft.nn.LayerNorm(8, mode="graph")


class MeanOfBlock(OverBlocks):
    def mixed(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


class MeanOfSampledBlocks(OverBlocks):
    """It centres sampled batches, and leaves the whole graph as it is."""

    def forward(self, x: Tensor, blocks: Any) -> Tensor:
        first, last = blocks if isinstance(blocks, tuple) else (blocks, blocks)
        h = torch.tanh(self.first(x, first))
        return self.last(h - h.mean(0) if isinstance(blocks, tuple) else h, last)


class BothDirections(nn.Module):
    """It also reads the nodes that a node has edges to, of which a part of a batch has some."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.first, self.back = weft.nn.SAGEConv(in_features, 8), weft.nn.SAGEConv(8, out_features)

    def forward(self, x: Tensor, adj: Any) -> Tensor:
        return self.back(F.dropout(torch.tanh(self.first(x, adj)), 0.3, self.training), adj.transposed())


class LargestSeen(Plain):
    """A buffer that no loss depends on, with the largest activation of all nodes."""

    def __init__(self, in_features: int, out_features: int, hidden: int = 8) -> None:
        super().__init__(in_features, out_features, hidden)
        self.register_buffer("largest", torch.zeros(()))

    def mixed(self, h: Tensor) -> Tensor:
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, h.detach().amax()))
        return h


class DotProducts(nn.Module):
    """Attention by Weft's operators, edges weighted by the first of their features."""

    def __init__(self, in_features: int, out_features: int, hidden: int = 8) -> None:
        super().__init__()
        self.first, self.last = weft.nn.SAGEConv(in_features, hidden), weft.nn.SAGEConv(hidden, out_features)

    def forward(self, x: Tensor, adj: Any) -> Tensor:
        h = torch.tanh(self.first(x, adj))
        scores = weft.ops.edge_softmax(adj, weft.ops.sddmm(adj, h, h, heads=2)).mean(-1)
        return self.last(weft.ops.spmm(adj, h, weight=scores * adj.edge_attr[:, 0]), adj)


MIXING = (
    Mean,
    GatedVirtualNode,
    PairNorm,
    InstanceNorm,
    SoftmaxOverNodes,
    Cumsum,
    Positions,
    OnlyInEvaluation,
    ALittleInEvaluation,
    Noise,
    LargestSeen,
)
