"""Modules with tensors in the memory of their weights: detached, ``.data``, rows and views."""

from __future__ import annotations

import torch
from torch import nn

from tests.runtime.user_modules.odd_modules import Base


class DetachedWeight(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.w = self.last.weight.detach()

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h) + h @ self.w.T


class DataOfWeight(DetachedWeight):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.w = self.last.weight.data


class RowsOfWeight(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.rows = [self.last.weight.detach()[0], self.last.bias.data]

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h) + (h @ self.rows[0])[:, None] + self.rows[1]


class ViewMadeInCall(Base):
    w = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.w is None:
            self.w = self.last.weight.detach()
        return self.last(h) + h @ self.w.T


class ReplacesWeight(Base):
    """In a plain loop the view stays where the weight was."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.w = self.last.weight.detach()

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.last.weight.data = self.last.weight.data * 0.99
        return self.last(h) + h @ self.w.T


class TiedByData(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight.data = self.a.weight.data

    def forward(self, x, adj):
        return self.last(self.b(torch.relu(self.a(self.hidden(x, adj)))))
