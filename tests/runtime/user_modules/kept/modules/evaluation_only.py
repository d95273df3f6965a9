"""Modules that training writes to and evaluations alone read: attributes of every type of number."""

from __future__ import annotations

import numpy as np
import torch

from tests.runtime.user_modules.kept.far import far
from tests.runtime.user_modules.odd_modules import Base


class WholeNumbers(Base):
    """An order of channels, found in training."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.order = torch.arange(8)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.order = far(h).argsort()
            return self.last(h)
        return self.last(h[:, self.order])


class TruthValues(Base):
    mask = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.mask = far(h) > 0
            return self.last(h)
        return self.last(h if self.mask is None else h * self.mask)


class ComplexNumbers(Base):
    turn = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.turn = torch.polar(torch.ones(8), far(h))
            return self.last(h)
        return self.last(h if self.turn is None else (h * self.turn).real)


class Slotted:
    __slots__ = ("chosen", "count")

    def __init__(self):
        self.chosen, self.count = torch.zeros(8, dtype=torch.bool), torch.zeros((), dtype=torch.int64)


class InSlots(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.own = Slotted()

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.own.chosen, self.own.count = far(h) > 0, self.own.count + 1
            return self.last(h)
        return self.last(h * self.own.chosen) / (1 + self.own.count % 3)


class InArray(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.mean = np.zeros(8, dtype="float32")

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.mean[:] = far(h).numpy()
            return self.last(h)
        return self.last(h + torch.from_numpy(self.mean.copy()))
