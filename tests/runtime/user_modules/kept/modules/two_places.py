"""Modules that keep one value in two places, or a tensor and views of it."""

from __future__ import annotations

import torch
from torch import nn

from tests.runtime.user_modules.kept.far import far
from tests.runtime.user_modules.odd_modules import Base


class SharedState(Base):
    """Two of its parts count in one dict."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.state = {"calls": 0}
        self.last.state = self.state

    def forward(self, x, adj):
        self.last.state["calls"] += self.training
        return super().forward(x, adj) * (1 + 0.1 * self.state["calls"])


class ParentInList(Base):
    """A child that knows its parent, which counts."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.child = nn.Identity()
        self.child.parent = [self]
        self.count = 0

    def forward(self, x, adj):
        self.child.parent[0].count += self.training
        return super().forward(x, adj) * (1 + 0.1 * self.count)


class ViewsOfBank(Base):
    """Parts of a bank that is written as a whole."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.bank = torch.zeros(2, 8)
        self.parts = [self.bank[0], self.bank[1]]

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.bank.mul_(0.5).add_(far(h))
        return self.last(h + self.parts[0] - 0.5 * self.parts[1])


class OneTensorTwice(Base):
    first = second = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.first is None:
            self.first = self.second = torch.zeros(8)
        if self.training:
            self.first.mul_(0.5).add_(far(h))
        return self.last(h + self.second)


class OneListTwice(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if not hasattr(self, "seen"):
            self.seen = []
            self.by_name = {"seen": self.seen}
        if self.training:
            self.seen.append(far(h))
            del self.seen[:-3]
        return self.last(h + sum(self.by_name["seen"], torch.zeros(8)))


class ViewsOfKept(Base):
    """The view is kept before what it is a part of."""

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if not hasattr(self, "bank"):
            bank = torch.zeros(3, 8)
            self.first, self.bank = bank[0], bank
        if self.training:
            self.bank.mul_(0.5)[0] += far(h)
        return self.last(h + self.first)


class LaterViewOfKept(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.bank = torch.zeros(3, 8)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if not hasattr(self, "first"):
            self.first = self.bank[0]
        if self.training:
            self.bank.mul_(0.5)[0] += far(h)
        return self.last(h + self.first)


class OneTensorInTwoModules(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(8, 8)))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if not hasattr(self.last, "mean"):
            self.inner[0][0].mean = self.last.mean = torch.zeros(8)
        if self.training:
            self.last.mean.mul_(0.5).add_(far(h))
        return self.last(self.inner(h) + self.inner[0][0].mean)
