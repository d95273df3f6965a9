"""Modules whose buffers are made late, replaced, written in place, or in one memory with others."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.user_modules.kept.far import far
from tests.runtime.user_modules.odd_modules import Base


class BufferInList(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.norm = nn.BatchNorm1d(8)
        self.statistics = [self.norm.running_mean]

    def forward(self, x, adj):
        return self.last(self.norm(self.hidden(x, adj)) + self.statistics[0])


class BufferMadeInCall(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if not hasattr(self, "mean"):
            self.register_buffer("mean", h.detach().mean(0))
        elif self.training:
            self.mean.mul_(0.5).add_(far(h))
        return self.last(h - self.mean)


class BufferOfNone(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("mean", None)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.mean = far(h) if self.mean is None else 0.5 * self.mean + far(h)
        return self.last(h if self.mean is None else h - self.mean)


class NotPersistent(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.mean.mul_(0.5).add_(far(h))
        return self.last(h - self.mean)


class InPlaceBuffer(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("bank", torch.zeros(5, 8))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def store(self, h):
        self.bank[self.at % 5] = far(h)
        self.at += 1

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.store(h)
        return self.last(h + self.bank.mean(0))


class PrototypesInLoss(Base):
    """Running centres of classes by predicted label."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("centres", torch.zeros(o, 8))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        out = self.last(h)
        if self.training:
            with torch.no_grad():
                one = F.one_hot(out.argmax(-1), out.shape[1]).float()
                means = one.T @ h / one.sum(0).clamp(min=1)[:, None]
                self.centres.mul_(0.5).add_(means, alpha=0.5)
        return out - torch.cdist(h, self.centres)


class ViewsOfBuffers(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("table", torch.zeros(2, 8))
        self.register_buffer("first", self.table[0])

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.table.mul_(0.5).add_(far(h))
        return self.last(h + self.first)


class ConstantViewsOfBuffers(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("table", torch.linspace(0, 1, 16).view(2, 8))
        self.register_buffer("first", self.table[0])

    def forward(self, x, adj):
        return self.last(self.hidden(x, adj) + self.first + self.table[1])


class ReplacesBuffer(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("mean", torch.zeros(8))
        self.first = [self.mean]

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.mean = 0.5 * self.mean + far(h)
        return self.last(h + self.mean + self.first[0])


class BufferOfEvaluations(Base):
    """A buffer that only evaluations change."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if not self.training:
            self.mean.mul_(0.5).add_(far(h))
        return self.last(h + self.mean)
