"""Modules that keep something from call to call: teachers, banks, centroids, histories, schedules."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.user_modules.odd_modules import Base


class EMATeacher(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.teacher = copy.deepcopy(self.last)
        for p in self.teacher.parameters():
            p.requires_grad = False

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.last.parameters(), strict=True):
                    t.mul_(0.9).add_(s, alpha=0.1)
            return self.last(h), 0.5 * F.mse_loss(self.last(h), self.teacher(h).detach())
        return self.teacher(h)


class MemoryBank(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("bank", torch.zeros(16, 8))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            k = int(self.ptr)
            self.bank[k : k + 4] = h[:4].detach()
            self.ptr[0] = (k + 4) % 16
        return self.last(h + 0.3 * (h @ self.bank.T).softmax(-1) @ self.bank)


class Centroids(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("cent", torch.randn(5, 8))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        a = torch.cdist(h, self.cent).argmin(1)
        if self.training:
            with torch.no_grad():
                s = torch.zeros(5, 8).index_add(0, a, h)
                c = torch.bincount(a, minlength=5).clamp(min=1)[:, None]
                self.cent.mul_(0.9).add_(0.1 * s / c)
        return self.last(h + self.cent[a])


class HistEmb(Base):
    """GAS-like history: reads what the previous step pushed"""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.history = torch.zeros(40, 8)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        out = 0.5 * h + 0.5 * self.history
        if self.training:
            self.history.copy_(h.detach())
        return self.last(out)


class CosTemp(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.t = 0

    def forward(self, x, adj):
        if self.training:
            self.t += 1
        T = 0.5 + 0.5 * (1 + math.cos(math.pi * min(self.t, 20) / 20))
        return super().forward(x, adj) / T


class Warmup(Base):
    """adds a branch only after 3 training calls"""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("t", torch.zeros((), dtype=torch.long))
        self.extra = nn.Linear(8, o)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.t += 1
        w = (self.t.float() / 10).clamp(max=1)
        return self.last(h) + w * self.extra(h)
