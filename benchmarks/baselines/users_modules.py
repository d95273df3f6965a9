"""Modules as users write them with torch's own norms, dropout and attention, to be stacked and estimated.

``users_module(name)`` is a factory ``(in_features, out_features) -> nn.Module``.
Shapes: N nodes, H hidden, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn import GCNConv, SAGEConv
from weft.ops import Adjacency

Factory = Callable[[int, int], nn.Module]


class NormedGCN(nn.Module):
    """Three of Weft's convolutions with torch's norm, relu and dropout between them, and skip connections."""

    def __init__(self, norm: Callable[[int], nn.Module], conv: type, inputs: int, outputs: int, hidden: int) -> None:
        super().__init__()
        sizes = [inputs, hidden, hidden, outputs]
        self.convs = nn.ModuleList(conv(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(norm(hidden) for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, adj: Adjacency) -> Tensor:
        """Logits ``[N, C]``."""
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=False)):
            out = self.dropout(torch.relu(norm(conv(x, adj))))
            x = out if place == 0 else out + x
        return self.convs[-1](x, adj)


class GatedMLP(nn.Module):
    """Attention of every node over its own feature groups (torch's), then two convolutions."""

    def __init__(self, inputs: int, outputs: int, hidden: int, groups: int = 4) -> None:
        super().__init__()
        self.groups, self.first = groups, nn.Linear(inputs, hidden)
        self.query, self.key, self.value = (nn.Linear(hidden // groups, hidden // groups) for _ in range(3))
        self.norm = nn.LayerNorm(hidden)
        self.convs = nn.ModuleList([GCNConv(hidden, hidden), GCNConv(hidden, outputs)])

    def forward(self, x: Tensor, adj: Adjacency) -> Tensor:
        """Logits ``[N, C]``."""
        h = F.dropout(torch.relu(self.first(x)), 0.5, self.training)
        parts = h.unflatten(-1, (self.groups, -1))
        scores = self.query(parts) @ self.key(parts).transpose(-1, -2) / parts.shape[-1] ** 0.5
        mixed = torch.softmax(scores, -1) @ self.value(parts)
        h = self.norm(h + mixed.flatten(-2))
        return self.convs[1](torch.relu(self.convs[0](h, adj)), adj)


class PygTransformer(nn.Module):
    """Two of PyG's TransformerConv with torch's layer norm and dropout."""

    def __init__(self, inputs: int, outputs: int, hidden: int, heads: int = 2) -> None:
        from torch_geometric.nn import TransformerConv

        super().__init__()
        self.first = TransformerConv(inputs, hidden // heads, heads=heads, dropout=0.2)
        self.second = TransformerConv(hidden, outputs, heads=1)
        self.norm, self.dropout = nn.LayerNorm(hidden), nn.Dropout(0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Logits ``[N, C]``."""
        return self.second(self.dropout(torch.relu(self.norm(self.first(x, edge_index)))), edge_index)


def _makers(hidden: int) -> dict[str, Factory]:
    return {
        "own-layernorm-gcn": lambda i, o: NormedGCN(nn.LayerNorm, GCNConv, i, o, hidden),
        "own-batchnorm-gcn": lambda i, o: NormedGCN(nn.BatchNorm1d, GCNConv, i, o, hidden),
        "own-layernorm-sage": lambda i, o: NormedGCN(nn.LayerNorm, SAGEConv, i, o, hidden),
        "own-attention": lambda i, o: GatedMLP(i, o, hidden),
        "own-transformerconv": lambda i, o: PygTransformer(i, o, hidden),
    }


NAMES = tuple(_makers(16))


def users_module(name: str, hidden: int = 64) -> Factory:
    """The factory of a module by its name."""
    make = _makers(hidden)[name]

    def build(in_features: int, out_features: int) -> nn.Module:
        return make(in_features, out_features)

    build.__name__ = name
    return build
