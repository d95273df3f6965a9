"""Modules that keep a tensor in an attribute: tables, banks, what the first call saw, the input."""

from __future__ import annotations

import torch

from tests.runtime.user_modules.kept.far import far
from tests.runtime.user_modules.odd_modules import Base


class EveryThird(Base):
    """A table that is built anew at every third call."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.calls, self.table = 0, None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            if self.calls % 3 == 0:
                self.table = far(h)
            self.calls += 1
        return self.last(h if self.table is None else h + self.table)


class SparseEveryCall(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        self.last_graph = (h.detach() > h.detach().mean()).float().to_sparse()
        return self.last(h)


class SparseRead(Base):
    kept = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.kept = (h.detach() > h.detach().mean()).float().to_sparse()
            return self.last(h)
        return self.last(h if self.kept is None else h + self.kept.to_dense())


class Bank(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.bank = torch.zeros(40, 8)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.bank[::2] = 0.5 * self.bank[::2] + h.detach()[::2]
        return self.last(h + self.bank)


class BankByData(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.bank = torch.zeros(8)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.bank.data.copy_(0.5 * self.bank + far(h))
        return self.last(h + self.bank)


class CachedByShape(Base):
    """A table of the graph alone, by shape."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.tables = {}

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if h.shape not in self.tables:
            self.tables[h.shape] = torch.linspace(0, 1, h.shape[0])[:, None].expand(h.shape)
        return self.last(h + self.tables[h.shape])


class FirstCallDecides(Base):
    """Centres itself by what its first call saw, for ever."""

    centre = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.centre is None:
            self.centre = far(h)
        return self.last(h - self.centre)


class KeepsInput(Base):
    """Its first call has nothing to add."""

    seen = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.seen is not None and self.training:
            h = h + self.seen[:, :1]
        self.seen = x
        return self.last(h)


class Monitors(Base):
    """A running mean for its author, which no result depends on."""

    mean = 0.0

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        self.mean = 0.9 * self.mean + 0.1 * far(h)
        return self.last(h)


class FlagAndTable(Base):
    """A first call builds a table of the graph, and a flag guards it."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.table, self.done = None, False

    def forward(self, x, adj):
        if not self.done:
            self.table, self.done = torch.linspace(0.5, 2.0, x.shape[0])[:, None], True
        h = self.hidden(x, adj)
        return self.last(h if self.table is None else h * self.table)
