"""A module of a user's own, for results that are loaded in another process."""

from __future__ import annotations

import torch
from torch import nn

import weft


class Net(nn.Module):
    """Two layers with a batch norm, whose running sums are part of what was trained."""

    def __init__(self, in_features: int, out_features: int, hidden: int = 8) -> None:
        super().__init__()
        self.first, self.norm = weft.nn.GCNConv(in_features, hidden), nn.BatchNorm1d(hidden)
        self.last, self.drop = weft.nn.GCNConv(hidden, out_features), nn.Dropout(0.3)

    def forward(self, x, adj):
        return self.last(self.drop(torch.relu(self.norm(self.first(x, adj)))), adj)
