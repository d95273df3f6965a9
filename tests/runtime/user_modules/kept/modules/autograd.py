"""Modules that depend on the backward pass: kept gradients, own functions, checkpointing, gradient mode."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from tests.runtime.user_modules.odd_modules import Base


class KeptGradient(Base):
    """Adds the last gradient of an activation, which a hook leaves."""

    grad = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.grad is not None:
            h = h + self.grad
        if h.requires_grad:
            h.register_hook(self.keep)
        return self.last(h)

    def keep(self, grad):
        self.grad = 10 * grad.detach().mean(0)


class Remembering(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, store):
        ctx.store = store
        return x * (1 + 0.1 * store["backwards"])

    @staticmethod
    def backward(ctx, grad):
        ctx.store["backwards"] += 1
        return grad, None


class FunctionWithState(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.store = {"backwards": 0}

    def forward(self, x, adj):
        return self.last(Remembering.apply(self.hidden(x, adj), self.store))


class Checkpointed(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return checkpoint(self.last, h, use_reentrant=False) if self.training else self.last(h)


class ByGradientMode(Base):
    count = 0

    def forward(self, x, adj):
        if torch.is_grad_enabled():
            self.count += 1
        return super().forward(x, adj) * (1 + 0.05 * self.count)


class CountsGradients(Base):
    """A buffer counts the activations that require gradients, and evaluations read it."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training and h.requires_grad:
            self.count += 1
        return self.last(h) * (1 + 0.05 * self.count * (not self.training))
