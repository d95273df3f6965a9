"""A two-layer network over Weft's layers; plain PyTorch otherwise."""

import torch
from torch import nn

import weft


class Net(nn.Module):
    """GCN, then SAGE."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.first = weft.nn.GCNConv(in_features, 32)
        self.drop = weft.nn.Dropout(0.5)
        self.second = weft.nn.SAGEConv(32, out_features)

    def forward(self, x, adj):
        """``x [N, F]`` dense or sparse, ``adj`` the plain adjacency."""
        hidden = self.drop(torch.relu(self.first(x, adj)))
        return self.second(hidden, adj)
