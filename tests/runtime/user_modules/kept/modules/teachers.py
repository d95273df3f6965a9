"""Modules with a second network of their own: a teacher, an average of weights, a layer that they train."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.user_modules.odd_modules import Base


class TeacherInList(Base):
    """Begins as a copy of its student."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.teachers = [copy.deepcopy(self.last).requires_grad_(False)]

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            for mine, theirs in zip(self.teachers[0].parameters(), self.last.parameters(), strict=True):
                mine.data.mul_(0.7).add_(theirs.data, alpha=0.3)
        return self.last(h) + self.teachers[0](h)


class TeacherMadeInCall(Base):
    teachers = ()

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if not self.teachers:
            self.teachers = [copy.deepcopy(self.last).requires_grad_(False)]
        if self.training:
            with torch.no_grad():
                self.teachers[0].weight.lerp_(self.last.weight, 0.3)
        return self.last(h) + self.teachers[0](h)


class AverageInDict(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.average = {}

    def forward(self, x, adj):
        if self.training:
            for name, p in self.named_parameters():
                self.average[name] = self.average.get(name, p.detach()) * 0.8 + 0.2 * p.detach()
            return super().forward(x, adj)
        return torch.func.functional_call(super(), self.average, (x, adj)) if False else self.averaged(x, adj)

    def averaged(self, x, adj):
        h = self.hidden(x, adj)
        return F.linear(h, self.average.get("last.weight", self.last.weight), self.average.get("last.bias"))


class InnerAverage(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.average = [torch.optim.swa_utils.AveragedModel(self.last)]

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.average[0].update_parameters(self.last)
            return self.last(h)
        return self.average[0](h)


class InnerOptimizer(Base):
    """Trains a layer of its own."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.probe = [nn.Linear(8, o)]
        self.inner = torch.optim.Adam(self.probe[0].parameters(), lr=0.05)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            guess = self.probe[0](h.detach())
            self.inner.zero_grad()
            (guess.square() - guess).mean().backward()
            self.inner.step()
        return self.last(h) + self.probe[0](h).detach()
