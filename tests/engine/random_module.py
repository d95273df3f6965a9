"""A user's module that draws from torch's generator."""

from __future__ import annotations

import torch


class TorchDropout(torch.nn.Module):
    """Randomness from torch's generator, which a checkpoint has to carry and members must not share."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.layer = torch.nn.Linear(in_features, out_features)

    def forward(self, x):
        return self.layer(torch.nn.functional.dropout(x, 0.5, self.training))
