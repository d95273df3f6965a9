"""Modules with properties, own attribute lookup, iterators, locks, weak references and functions of Python."""

from __future__ import annotations

import itertools
import threading
import weakref

from torch.nn import functional as F

from tests.runtime.user_modules.odd_modules import Base


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


class ItertoolsCount(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.numbers = itertools.count()

    def forward(self, x, adj):
        return super().forward(x, adj) * (1 + 0.1 * (next(self.numbers) if self.training else 0))


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


class FunctionOnSelf(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.calls = 0
        self.scaled = lambda h: self.last(h) / (1 + 0.1 * self.calls)

    def forward(self, x, adj):
        self.calls += self.training
        return self.scaled(self.hidden(x, adj))
