"""Modules whose first call makes parameters or layers."""

from __future__ import annotations

import torch
from torch import nn

from tests.runtime.user_modules.kept.far import far
from tests.runtime.user_modules.odd_modules import Base


class Lazy(Base):
    def __init__(self, i, o):
        nn.Module.__init__(self)
        self.first, self.last, self.mean = nn.LazyLinear(8), nn.LazyLinear(o), None

    def forward(self, x, adj):
        h = torch.relu(self.first(x))
        if self.training:
            self.mean = far(h)
            return self.last(h)
        return self.last(h if self.mean is None else h + self.mean)


class MakesParameter(Base):
    """Makes a parameter in its first call, which a plain loop's optimizer does not know."""

    def forward(self, x, adj):
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.full((8,), 2.0))
        return self.last(self.hidden(x, adj) * self.scale)


class MakesModule(Base):
    """Makes a frozen layer in its first call."""

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if not hasattr(self, "extra"):
            self.extra = nn.Linear(8, self.last.out_features).requires_grad_(False)
        return self.last(h) + self.extra(h)


class MadeOverNone(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.extra = None

    def forward(self, x, adj):
        if self.extra is None:
            self.extra = nn.Linear(8, 8)
        return self.last(self.extra(self.hidden(x, adj)))
