"""Modules that keep something outside of themselves: global variables, defaults, closures, cached functions."""

from __future__ import annotations

import functools
import weakref

import torch

from tests.runtime.user_modules.kept.far import far
from tests.runtime.user_modules.odd_modules import Base

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


class LruCache(Base):
    @functools.lru_cache  # noqa: B019
    def scale(self, n):
        return torch.linspace(0.5, 1.5, n)

    def forward(self, x, adj):
        return self.last(self.hidden(x, adj) * self.scale(8))


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
