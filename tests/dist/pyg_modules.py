"""Modules over PyG's layers for ranks; of their own so that spawned ranks can import them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import nn as pyg
from torch_geometric.utils import degree


class Convolutions(nn.Module):
    """Layers that Weft converts: GCN with weights of edges, GAT, SAGE and GIN."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.gcn, self.gat = pyg.GCNConv(in_features, 8), pyg.GATConv(8, 4, heads=2)
        self.sage, self.gin = pyg.SAGEConv(8, 8), pyg.GINConv(nn.Linear(8, out_features))

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        h = F.dropout(self.gcn(x, edge_index, edge_weight).relu(), 0.3, self.training)
        return self.gin(self.sage(self.gat(h, edge_index).tanh(), edge_index).relu(), edge_index)


class WithoutDropout(Convolutions):
    """The same without dropout, whose masks are others over ranks that sample."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        h = self.gcn(x, edge_index, edge_weight).relu()
        return self.gin(self.sage(self.gat(h, edge_index).tanh(), edge_index).relu(), edge_index)


class NotConverted(nn.Module):
    """A layer that Weft has no counterpart of."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.conv = pyg.TAGConv(in_features, out_features)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


class CountsEdges(nn.Module):
    """A converted layer, and degrees that the module counts by itself."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(in_features, out_features)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index) * torch.log1p(degree(edge_index[1], x.shape[0]))[:, None]


class Alone(nn.Module):
    """No layer of PyG at all."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.out = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.out(torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]))
