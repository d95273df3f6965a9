"""Modules that draw random numbers in ``forward``, from torch's generators or by torch's dropout."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Sums(nn.Module):
    """Two layers that add up neighbours."""

    def __init__(self, i, o):
        super().__init__()
        self.first, self.last = nn.Linear(i, 8), nn.Linear(8, o)

    def neighbours(self, h, edge_index, weight=None):
        rows = h[edge_index[0]] if weight is None else h[edge_index[0]] * weight[:, None]
        return h + 0.2 * torch.zeros_like(h).index_add(0, edge_index[1], rows)

    def hidden(self, x, edge_index):
        return torch.relu(self.neighbours(self.first(x), edge_index))

    def forward(self, x, edge_index):
        return self.last(self.hidden(x, edge_index))


class DropEdge(Sums):
    """Leaves out edges."""

    def hidden(self, x, edge_index):
        if self.training:
            edge_index = edge_index[:, torch.rand(edge_index.shape[1], device=x.device) < 0.7]
        return super().hidden(x, edge_index)


class DropWeight(Sums):
    """Multiplies edges by 0 or 1, with static shapes."""

    def hidden(self, x, edge_index):
        weight = torch.ones(edge_index.shape[1], device=x.device)
        weight = torch.bernoulli(0.7 * weight) if self.training else weight
        return torch.relu(self.neighbours(self.first(x), edge_index, weight))


class StochasticDepth(Sums):
    """Skips the propagation in some steps, by a number that is drawn on the device."""

    def hidden(self, x, edge_index):
        if self.training and torch.rand((), device=x.device) < 0.5:
            return torch.relu(self.first(x))
        return super().hidden(x, edge_index)


class DepthByHost(Sums):
    """The same by a number that is drawn on the host."""

    def hidden(self, x, edge_index):
        if self.training and float(torch.rand(())) < 0.5:
            return torch.relu(self.first(x))
        return super().hidden(x, edge_index)


class RandomSlopes(Sums):
    """RReLU."""

    def hidden(self, x, edge_index):
        return F.rrelu(self.neighbours(self.first(x), edge_index), training=self.training)


class Checkpointed(Sums):
    """Dropout in a part that the backward pass computes again."""

    def forward(self, x, edge_index):
        def rest(h):
            return self.last(F.dropout(h, 0.4, self.training))

        return checkpoint(rest, self.hidden(x, edge_index), use_reentrant=False)


class Functional(Sums):
    """F.dropout."""

    def forward(self, x, edge_index):
        return self.last(F.dropout(self.hidden(x, edge_index), 0.4, self.training))


class Dropped(Sums):
    """nn.Dropout."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.drop = nn.Dropout(0.4)

    def forward(self, x, edge_index):
        return self.last(self.drop(self.hidden(x, edge_index)))


STACKED = (Functional, Dropped)
DRAWING = (DropEdge, DropWeight, StochasticDepth, DepthByHost, RandomSlopes, Checkpointed, *STACKED)
