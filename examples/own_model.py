"""A two-layer network over Weft's layers; plain PyTorch otherwise."""

import torch
from torch import nn

import weft


class Net(nn.Module):
    """GCN, then SAGE."""

    def __init__(self, in_features: int, out_features: int, hidden: int = 32, dropout: float = 0.5) -> None:
        super().__init__()
        self.first = weft.nn.GCNConv(in_features, hidden)
        self.drop = weft.nn.Dropout(dropout)
        self.second = weft.nn.SAGEConv(hidden, out_features)

    def forward(self, x, adj):
        """``x [N, F]`` dense or sparse, ``adj`` the plain adjacency."""
        hidden = self.drop(torch.relu(self.first(x, adj)))
        return self.second(hidden, adj)
