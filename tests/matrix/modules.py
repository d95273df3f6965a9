"""Modules as users write them: over Weft's layers, and over PyG's."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import weft


class Own(nn.Module):
    """Two of Weft's layers, a dense one, and dropout; sampled batches have an adjacency per layer."""

    def __init__(self, in_features, out_features, dropout=0.0):
        super().__init__()
        self.rate = dropout
        self.first, self.second = weft.nn.SAGEConv(in_features, 8), weft.nn.GCNConv(8, 8)
        self.last = nn.Linear(8, out_features)

    def forward(self, x, adj):
        near, far = adj if isinstance(adj, tuple) else (adj, adj)
        h = F.dropout(torch.relu(self.first(x, near)), self.rate, self.training)
        return self.last(torch.relu(self.second(h, far)))


class Pyg(nn.Module):
    """Two layers of PyG and dropout."""

    def __init__(self, in_features, out_features, dropout=0.0):
        from torch_geometric.nn import SAGEConv

        super().__init__()
        self.rate = dropout
        self.first, self.second = SAGEConv(in_features, 8), SAGEConv(8, out_features)

    def forward(self, x, edge_index):
        h = F.dropout(torch.relu(self.first(x, edge_index)), self.rate, self.training)
        return self.second(h, edge_index)
