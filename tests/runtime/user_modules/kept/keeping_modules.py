"""Modules that keep something between calls, in every way that a researcher may write."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import threading
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.runtime.user_modules.odd_modules import Base

Seen = namedtuple("Seen", "mean count")


@dataclass
class Running:
    mean: Tensor | None = None
    counts: list[int] = field(default_factory=list)


class Slotted:
    __slots__ = ("chosen", "count")

    def __init__(self):
        self.chosen, self.count = torch.zeros(8, dtype=torch.bool), torch.zeros((), dtype=torch.int64)


def far(h: Tensor) -> Tensor:
    """A row of numbers that differs much from epoch to epoch."""
    return (h.detach() * 40).sin().mean(0) * 3


# ---- read by evaluations only -----------------------------------------------------------------------------------


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


# ---- memory of weights ------------------------------------------------------------------------------------------


class DetachedWeight(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.w = self.last.weight.detach()

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h) + h @ self.w.T


class DataOfWeight(DetachedWeight):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.w = self.last.weight.data


class RowsOfWeight(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.rows = [self.last.weight.detach()[0], self.last.bias.data]

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h) + (h @ self.rows[0])[:, None] + self.rows[1]


class ViewMadeInCall(Base):
    w = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.w is None:
            self.w = self.last.weight.detach()
        return self.last(h) + h @ self.w.T


class BufferInList(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.norm = nn.BatchNorm1d(8)
        self.statistics = [self.norm.running_mean]

    def forward(self, x, adj):
        return self.last(self.norm(self.hidden(x, adj)) + self.statistics[0])


# ---- buffers ----------------------------------------------------------------------------------------------------


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


# ---- teachers ---------------------------------------------------------------------------------------------------


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


# ---- tables, banks and queues -----------------------------------------------------------------------------------


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


class Queue(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.queue = deque(maxlen=3)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.queue.append(far(h))
        return self.last(h + torch.stack(list(self.queue)).mean(0) if self.queue else h)


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


class NoiseOfFirstCall(Base):
    noise = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.noise is None:
            self.noise = torch.randn(8)
        return self.last(h + self.noise)


class NamedTupleState(Base):
    seen = Seen(torch.zeros(8), 0)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.seen = Seen(0.5 * self.seen.mean + far(h), self.seen.count + 1)
        return self.last(h + self.seen.mean / (1 + self.seen.count))


class DataclassState(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.running = Running()

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.running.mean = far(h) if self.running.mean is None else 0.5 * self.running.mean + far(h)
            self.running.counts.append(len(self.running.counts))
        return self.last(h if self.running.mean is None else h + self.running.mean)


class NewObjectEachCall(Base):
    running = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            before = 0 if self.running is None else self.running.mean
            self.running = Running(0.5 * before + far(h))
        return self.last(h if self.running is None else h + self.running.mean)


class DefaultDict(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.seen, self.order = defaultdict(list), OrderedDict()

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.seen[len(self.order) % 2].append(far(h))
            self.order[len(self.order)] = (1, 2)
        return self.last(h + sum((one[-1] for one in self.seen.values()), torch.zeros(8)))


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


# ---- what begins later ------------------------------------------------------------------------------------------


class AfterWarmUp(Base):
    """Its memory begins after four training calls, counted in a buffer."""

    memory = None

    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.calls += 1
            if self.calls.item() > 4:
                self.memory = far(h) if self.memory is None else 0.5 * self.memory + far(h)
        return self.last(h if self.memory is None else h + self.memory)


class AfterWarmUpInPython(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.calls, self.memory = 0, []

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.calls += 1
            if self.calls > 4:
                self.memory.append(far(h))
        return self.last(h + self.memory[-1] if self.memory else h)


class TeacherAfterWarmUp(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("calls", torch.zeros(()))
        self.teacher = nn.Linear(8, o).requires_grad_(False)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.calls += 1
            if bool(self.calls > 4):
                self.teacher.weight.data.copy_(0.5 * self.teacher.weight.data + 0.5 * self.last.weight.data)
        return self.last(h) + self.teacher(h)


class DrawsAfterWarmUp(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.calls += 1
            if float(self.calls) > 4:
                h = h * (1 + random.random() + float(np.random.rand()))
        return self.last(h)


class AfterBestEpoch(Base):
    """Keeps something from the ninth call on, most likely after the best epoch."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("calls", torch.zeros(()))
        self.scale = 1.0

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.calls += 1
            if float(self.calls) > 8:
                self.scale *= 3.0
        return self.last(h) * self.scale


class Curriculum(Base):
    """Drops fewer channels from call to call."""

    step = 0

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.step = self.step + 1
        return self.last(h * (torch.arange(8) < self.step))


# ---- generators -------------------------------------------------------------------------------------------------


class OwnTorchGenerator(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.draw = torch.Generator().manual_seed(5)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            gumbel = -torch.empty_like(h).exponential_(generator=self.draw).log()
            h = h + 0.1 * gumbel
        return self.last(h)


class OwnGenerators(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.draws = {"numpy": np.random.default_rng(1), "old": np.random.RandomState(2), "python": random.Random(3)}

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            h = h * (self.draws["numpy"].random() + self.draws["old"].rand() + self.draws["python"].random())
        return self.last(h)


class StochasticDepth(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.deep = nn.Linear(8, 8)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        keep = (torch.rand(()) < 0.7).float() / 0.7 if self.training else 1.0
        return self.last(h + keep * self.deep(h))


# ---- Python -----------------------------------------------------------------------------------------------------


class LruCache(Base):
    @functools.lru_cache  # noqa: B019
    def scale(self, n):
        return torch.linspace(0.5, 1.5, n)

    def forward(self, x, adj):
        return self.last(self.hidden(x, adj) * self.scale(8))


class Properties(Base):
    _calls = 0

    @property
    def factor(self):
        return 1 + 0.1 * self._calls

    def forward(self, x, adj):
        self._calls = self._calls + self.training
        return super().forward(x, adj) * self.factor


class GetAttr(Base):
    def __getattr__(self, name):
        if name == "doubled":
            return self.last.weight * 2
        return super().__getattr__(name)

    def forward(self, x, adj):
        return F.linear(self.hidden(x, adj), self.doubled)


class WeakReference(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.reference = weakref.ref(self.last)

    def forward(self, x, adj):
        return self.reference()(self.hidden(x, adj))


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


class HookKeeps(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.activations = {}
        self.conv.register_forward_hook(self.keep)

    def keep(self, module, given, out):
        self.activations["conv"] = far(out)

    def forward(self, x, adj):
        before = self.activations.get("conv", 0.0)
        return self.last(self.hidden(x, adj) + before)


class HookCounts(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        calls = [0]

        def hook(module, given, out):
            calls[0] += module.training
            return out * (1 + 0.1 * calls[0])

        self.last.register_forward_hook(hook)


class BackwardHookKeeps(Base):
    """Scales by how large the last gradient was."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.size = 1.0
        self.last.register_full_backward_hook(self.keep)

    def keep(self, module, given, out):
        self.size = 1.0 + float(out[0].norm())

    def forward(self, x, adj):
        return super().forward(x, adj) * self.size


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


class ItertoolsCount(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.numbers = itertools.count()

    def forward(self, x, adj):
        return super().forward(x, adj) * (1 + 0.1 * (next(self.numbers) if self.training else 0))


class Checkpointed(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return checkpoint(self.last, h, use_reentrant=False) if self.training else self.last(h)


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


class ByGradientMode(Base):
    count = 0

    def forward(self, x, adj):
        if torch.is_grad_enabled():
            self.count += 1
        return super().forward(x, adj) * (1 + 0.05 * self.count)


class SpectralNorm(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.last = nn.utils.parametrizations.spectral_norm(self.last)


class OldSpectralNorm(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.last = nn.utils.spectral_norm(self.last)


class OldWeightNorm(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.last = nn.utils.weight_norm(self.last)


class Orthogonal(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.last = nn.utils.parametrizations.orthogonal(self.last)


class Lazy(Base):
    def __init__(self, i, o):
        nn.Module.__init__(self)
        self.first, self.last, self.mean = nn.LazyLinear(8), nn.LazyLinear(o), None

    def forward(self, x, adj):
        h = torch.relu(self.first(x))
        if self.training:
            self.mean = far(h)
            return self.last(h)
        return self.last(h if self.mean is None else h + self.mean)


class ModulesInDict(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.experts = {"a": nn.Linear(8, o).requires_grad_(False), "b": nn.BatchNorm1d(8, affine=False)}

    def forward(self, x, adj):
        self.experts["b"].train(self.training)
        return super().forward(x, adj) + self.experts["a"](self.experts["b"](self.hidden(x, adj)))


class NumpyInConstructor(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.scale = np.random.rand(8).astype("float32")

    def forward(self, x, adj):
        return self.last(self.hidden(x, adj) * torch.from_numpy(self.scale))


class ScriptedLayer(Base):
    def __init__(self, i, o):
        nn.Module.__init__(self)
        self.first, self.last = nn.Linear(i, 8), torch.jit.script(nn.Linear(8, o))
        self.calls = 0

    def forward(self, x, adj):
        self.calls += self.training
        return self.last(torch.relu(self.first(x))) * (1 + 0.1 * self.calls)


class CountsInScript(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.calls, self.mean, self.last = 0, torch.zeros(8), nn.Linear(8, o)

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean = (h.detach() * 40).sin().mean(0)
        return self.last(h + self.mean) * (1 + 0.1 * self.calls)


class ScriptedState(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.last = torch.jit.script(CountsInScript(o))


class MakesParameter(Base):
    """Makes a parameter in its first call, which a plain loop's optimizer does not know."""

    def forward(self, x, adj):
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.full((8,), 2.0))
        return self.last(self.hidden(x, adj) * self.scale)


class MakesModule(Base):
    """Makes a frozen layer in its first call."""

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if not hasattr(self, "extra"):
            self.extra = nn.Linear(8, self.last.out_features).requires_grad_(False)
        return self.last(h) + self.extra(h)


class SharedState(Base):
    """Two of its parts count in one dict."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.state = {"calls": 0}
        self.last.state = self.state

    def forward(self, x, adj):
        self.last.state["calls"] += self.training
        return super().forward(x, adj) * (1 + 0.1 * self.state["calls"])


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


class Monitors(Base):
    """A running mean for its author, which no result depends on."""

    mean = 0.0

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        self.mean = 0.9 * self.mean + 0.1 * far(h)
        return self.last(h)


class EpochLengths(Base):
    """Switches its arithmetic by how often it was evaluated."""

    evaluated = 0

    def forward(self, x, adj):
        self.evaluated += not self.training
        h = self.hidden(x, adj)
        return self.last(h if self.evaluated < 5 else h.square())


class TiedByData(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight.data = self.a.weight.data

    def forward(self, x, adj):
        return self.last(self.b(torch.relu(self.a(self.hidden(x, adj)))))


# ---- outside of the module --------------------------------------------------------------------------------------

SEEN: dict[str, float] = {"mean": 1.0}
BY_MODULE: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class GlobalInEvaluation(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            SEEN["mean"] = 1 + float(far(h).abs().mean())
            return self.last(h)
        return self.last(h) * SEEN["mean"]


class ByModule(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            BY_MODULE[self] = far(h)
            return self.last(h)
        return self.last(h + BY_MODULE.get(self, 0.0))


class MutableDefault(Base):
    def forward(self, x, adj, memory=[]):  # noqa: B006
        h = self.hidden(x, adj)
        if self.training:
            memory.append(len(memory))
        return self.last(h) * (1 + 0.1 * len(memory))


def made_in_function(i, o):
    calls = [0]

    class Made(Base):
        def forward(self, x, adj):
            calls[0] += self.training
            return super().forward(x, adj) * (1 + 0.1 * calls[0])

    return Made(i, o)


# ---- buffers and views that are replaced ------------------------------------------------------------------------


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


class ReplacesWeight(Base):
    """In a plain loop the view stays where the weight was."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.w = self.last.weight.detach()

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.last.weight.data = self.last.weight.data * 0.99
        return self.last(h) + h @ self.w.T


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


class KeepsInput(Base):
    """Its first call has nothing to add."""

    seen = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.seen is not None and self.training:
            h = h + self.seen[:, :1]
        self.seen = x
        return self.last(h)


# ---- one value in two places, large ones, iterators, locks ------------------------------------------------------


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


class LargeByDataLater(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.table = torch.zeros(70_000, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.calls += 1
            if int(self.calls) > 4:
                self.table.data[0] = self.table.data[0] * 0.5 + far(h)
        return self.last(h + self.table[0])


class IteratorInEvaluation(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.factors = iter([1.0, 0.9, 0.8, 0.7, 0.6] * 100)

    def forward(self, x, adj):
        return super().forward(x, adj) * next(self.factors)


class Locked(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.lock = threading.Lock()

    def forward(self, x, adj):
        with self.lock:
            return super().forward(x, adj)


class MadeOverNone(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.extra = None

    def forward(self, x, adj):
        if self.extra is None:
            self.extra = nn.Linear(8, 8)
        return self.last(self.extra(self.hidden(x, adj)))


class HookOnSelf(Base):
    """A hook that refers to the module leaves an activation in it, as for saliency maps."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.seen = {}
        self.conv.register_forward_hook(lambda module, given, out: self.seen.__setitem__("conv", out))

    def forward(self, x, adj):
        return super().forward(x, adj) + self.seen["conv"].mean(1, keepdim=True) * torch.tensor([1.0, 2.0, 3.0])


class HookCountsOnSelf(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.calls = 0
        self.conv.register_forward_hook(self.counting())

    def counting(self):
        def hook(module, given, out):
            self.calls += self.training
            return out * (1 + 0.05 * self.calls)

        return hook


class FunctionOnSelf(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.calls = 0
        self.scaled = lambda h: self.last(h) / (1 + 0.1 * self.calls)

    def forward(self, x, adj):
        self.calls += self.training
        return self.scaled(self.hidden(x, adj))


class StateOfGenerator(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.state = torch.Generator().manual_seed(1).get_state()

    def forward(self, x, adj):
        h, draw = self.hidden(x, adj), torch.Generator()
        if self.training:
            draw.set_state(self.state)
            h = h + 0.1 * torch.randn(h.shape, generator=draw)
            self.state = draw.get_state()
        return self.last(h)


class CacheOfGraph(Base):
    """Counts, and reads what depends on the graph alone from a cache."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.calls = 0

    def forward(self, x, adj):
        self.calls += self.training
        return self.last(self.hidden(x, adj) @ doubled(8)) / (1 + 0.1 * self.calls)


@functools.lru_cache
def doubled(n):
    return torch.eye(n) * 2


ALL = [
    one
    for one in dict(globals()).values()
    if isinstance(one, type) and issubclass(one, Base) and one.__module__ == __name__
]
