"""Modules whose layers are wrapped, hooked, lazy, in a dict, without weights, or called in a way of their own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.runtime.user_modules.odd_modules import Base


class SpectralNorm(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.mid = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x, adj):
        return self.last(self.mid(self.hidden(x, adj)))


class OldSpectralNorm(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.mid = nn.utils.spectral_norm(nn.Linear(8, 8))

    def forward(self, x, adj):
        return self.last(self.mid(self.hidden(x, adj)))


class Standard(nn.Module):
    def forward(self, w):
        return (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5)


class WeightStd(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        parametrize.register_parametrization(self.last, "weight", Standard())


class Lazy(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a, self.b = nn.LazyLinear(8), nn.LazyLinear(o)

    def forward(self, x, adj):
        return self.b(torch.relu(self.a(x)))


class MDict(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.heads = nn.ModuleDict({"a.b".replace(".", "_"): nn.Linear(8, o), "self": nn.Linear(8, o)})

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return sum(m(h) for m in self.heads.values())


class PreHook(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.last.register_forward_pre_hook(lambda m, a: (a[0] * 2,))


class PreHookCounts(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.n = 0
        self.last.register_forward_pre_hook(self.hook)

    def hook(self, m, a):
        self.n += self.training
        return (a[0] * (1 + 0.05 * self.n),)


class NoParamBranch(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.branch = nn.Sequential(nn.ReLU(), nn.Identity())

    def forward(self, x, adj):
        return self.last(self.branch(self.hidden(x, adj)))


class OwnCall(Base):
    def __call__(self, x, adj):
        return super().__call__(x, adj) * 1.5
