"""A model that waits instead of computing: what a queue does with such tasks does not depend on other load."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


class Sleeping(nn.Module):
    """One linear layer, and ``seconds`` of sleep per pass."""

    def __init__(self, in_features: int, out_features: int, seconds: float = 0.01) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Logits of zeros and a rest."""
        if x.device.type != "meta":
            time.sleep(self.seconds)
        return nn.functional.linear(x, self.weight)
