"""Modules that a careless engine would train wrongly: what they keep, tie, hook, change and draw themselves."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft


class Base(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv, self.last = weft.nn.GCNConv(i, 8), nn.Linear(8, o)

    def hidden(self, x, adj):
        return torch.relu(self.conv(x, adj))

    def forward(self, x, adj):
        return self.last(self.hidden(x, adj))


class ZeroD(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, adj):
        return super().forward(x, adj) * self.scale


class KeepsActivation(Base):
    def forward(self, x, adj):
        self.embedding = self.hidden(x, adj)
        return self.last(self.embedding)


class ReadsKeptActivation(Base):
    kept = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        mixed = h if self.kept is None or not self.training else 0.5 * h + 0.5 * self.kept
        if self.training:
            self.kept = h.detach()
        return self.last(mixed)


class OwnList(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.scale = torch.rand(8).mul(3).tolist()

    def forward(self, x, adj):
        return self.last(self.hidden(x, adj) * torch.tensor(self.scale))


class OwnArrayInDict(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.about = {"scale": torch.rand(8).numpy()}

    def forward(self, x, adj):
        return self.last(self.hidden(x, adj) * torch.from_numpy(self.about["scale"]))


class Unregistered(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.__dict__["extra"] = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x, adj):
        return self.last(self.extra(self.hidden(x, adj)))


class OwnClosure(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        factor = float(torch.rand(()))
        self.act = lambda h: h * factor

    def forward(self, x, adj):
        return self.last(self.act(self.hidden(x, adj)))


class HookInForward(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return self.last(h)


class HookOnParameter(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.last.weight.register_hook(lambda grad: grad * 0)


class HookOnModule(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.last.register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))


class ParameterInList(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.own = list(self.last.parameters())

    def forward(self, x, adj):
        return F.linear(self.hidden(x, adj), *self.own)


class ParameterInClosure(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        weight, bias = self.last.weight, self.last.bias
        self.project = lambda h: F.linear(h, weight, bias)

    def forward(self, x, adj):
        return self.project(self.hidden(x, adj))


class ParameterInAnyType(ParameterInList):
    def forward(self, x, adj):
        return F.linear(self.hidden(x, adj), *(one.to(x.dtype) for one in self.own))


class TiedParameters(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x, adj):
        return self.last(self.b(torch.relu(self.a(self.hidden(x, adj)))))


class Frozen(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.conv.requires_grad_(False)


class Unused(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.never = nn.Linear(8, 8)


class Detached(Base):
    def forward(self, x, adj):
        return self.last(self.hidden(x, adj).detach())


class TiedBuffers(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        count = torch.zeros(1)
        self.register_buffer("count", count)
        self.last.register_buffer("same", count)

    def forward(self, x, adj):
        if self.training:
            self.count += 1
        return super().forward(x, adj) * (1 + 0.1 * self.last.same)


class ReplacedBuffer(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.last(h - self.mean)


class IntegerBuffer(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, adj):
        if self.training:
            self.calls += 1
        return super().forward(x, adj) / (1 + 0.1 * self.calls)


class Complex(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x, adj):
        return self.last((self.hidden(x, adj) * self.turn).abs())


class ClampedData(Base):
    def forward(self, x, adj):
        self.last.weight.data = self.last.weight.data.clamp(min=0)
        return super().forward(x, adj)


class ClampedInPlace(Base):
    def forward(self, x, adj):
        with torch.no_grad():
            self.last.weight.clamp_(min=-0.1, max=0.1)
        return super().forward(x, adj)


class ClampedLater(Base):
    """Its weights do not reach the bounds before some epochs."""

    def forward(self, x, adj):
        with torch.no_grad():
            self.last.weight.clamp_(min=-0.38, max=0.38)
        return super().forward(x, adj)


class ClampedInBackward(Base):
    """A hook on an activation constrains the weights while gradients are computed."""

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if h.requires_grad:
            h.register_hook(self.constrain)
        return self.last(h)

    def constrain(self, grad):
        with torch.no_grad():
            self.last.weight.clamp_(min=-0.1, max=0.1)


class ClampedLaterInBackward(ClampedInBackward):
    """Its weights do not reach the bounds before some epochs."""

    def constrain(self, grad):
        self.last.weight.data.clamp_(min=-0.38, max=0.38)


class ReplacedInBackward(ClampedInBackward):
    def constrain(self, grad):
        self.last.weight.data = self.last.weight.data.clamp(min=-0.1, max=0.1)


class DecaysInBackward(Base):
    """Part of the update is in the backward pass."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.last.weight.register_post_accumulate_grad_hook(self.decay)

    @staticmethod
    def decay(weight):
        weight.data.mul_(0.9)


class MaxNorm(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.embedding, self.last = nn.Embedding(40, 8, max_norm=0.5), nn.Linear(8, o)

    def forward(self, x, adj):
        return self.last(self.embedding(torch.arange(40)))


class CountsInPython(Base):
    calls = 0

    def __init__(self, i, o):
        super().__init__(i, o)
        self.calls = 0

    def forward(self, x, adj):
        if self.training:
            self.calls += 1
        return self.last(self.hidden(x, adj) * (1 + 0.1 * self.calls))


class CountsInDict(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.state = {"calls": 0}

    def forward(self, x, adj):
        if self.training:
            self.state["calls"] += 1
        return self.last(self.hidden(x, adj) * (1 + 0.1 * self.state["calls"]))


class Reentrant(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return checkpoint(self.last, h, use_reentrant=True) if self.training else self.last(h)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3  # on purpose not the derivative


class OwnFunction(Base):
    def forward(self, x, adj):
        return self.last(Doubling.apply(self.hidden(x, adj)))


class Spectral(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.last = nn.utils.parametrizations.weight_norm(self.last)


class Draws(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h + 0.1 * torch.randn_like(h) if self.training else h)


class DrawsWithPython(Base):
    def forward(self, x, adj):
        return self.last(self.hidden(x, adj) * (1 + random.random() * self.training))


class DrawsWithNumpy(Base):
    def forward(self, x, adj):
        return self.last(self.hidden(x, adj) * (1 + float(np.random.rand()) * self.training))


ALL = [
    *(Base, ZeroD, KeepsActivation, ReadsKeptActivation, OwnList, OwnArrayInDict, Unregistered, OwnClosure),
    *(HookInForward, HookOnParameter, HookOnModule, ParameterInList, ParameterInClosure, TiedParameters, Frozen),
    *(Unused, Detached, TiedBuffers, ReplacedBuffer, IntegerBuffer, Complex, ClampedData, ClampedInPlace),
    *(ClampedLater, MaxNorm, ClampedInBackward, ClampedLaterInBackward, ReplacedInBackward, DecaysInBackward),
    *(CountsInPython, CountsInDict, Reentrant, OwnFunction, Spectral, Draws, DrawsWithPython, DrawsWithNumpy),
]
STACKED = (
    *(Base, ZeroD, KeepsActivation, TiedParameters, Unused, Detached, TiedBuffers, ReplacedBuffer, IntegerBuffer),
    *(Complex, Spectral),
)
