"""Modules that return a loss of their own: penalties, quantisation, a reversed gradient."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.user_modules.odd_modules import Base


class RTuple(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h), h.square().mean()


class JacobianReg(Base):
    def forward(self, x, adj):
        if not self.training:
            return super().forward(x, adj)
        h = self.hidden(x, adj).detach().requires_grad_(True)
        z = self.last(h * h)
        (g,) = torch.autograd.grad(z.sum(), h, create_graph=True)
        return super().forward(x, adj), 0.1 * g.square().mean()


class VQ(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.code = nn.Embedding(6, 8)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        idx = torch.cdist(h, self.code.weight).argmin(1)
        q = self.code(idx)
        loss = F.mse_loss(q, h.detach()) + 0.25 * F.mse_loss(h, q.detach())
        return self.last(h + (q - h).detach()), loss


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.lam * g, None


class DANN(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.dom = nn.Linear(8, 2)
        self.p = 0.0

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.p = min(1.0, self.p + 0.1)
            d = self.dom(GradReverse.apply(h, self.p))
            return self.last(h), 0.1 * F.cross_entropy(d, (torch.arange(len(h)) % 2))
        return self.last(h)
