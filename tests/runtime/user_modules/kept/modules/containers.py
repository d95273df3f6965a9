"""Modules that keep tensors in a container or an object of Python: a queue, a dict, a dataclass."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.runtime.user_modules.kept.far import far
from tests.runtime.user_modules.odd_modules import Base

Seen = namedtuple("Seen", "mean count")


@dataclass
class Running:
    mean: Tensor | None = None
    counts: list[int] = field(default_factory=list)


class Queue(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.queue = deque(maxlen=3)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.queue.append(far(h))
        return self.last(h + torch.stack(list(self.queue)).mean(0) if self.queue else h)


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


class ModulesInDict(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.experts = {"a": nn.Linear(8, o).requires_grad_(False), "b": nn.BatchNorm1d(8, affine=False)}

    def forward(self, x, adj):
        self.experts["b"].train(self.training)
        return super().forward(x, adj) + self.experts["a"](self.experts["b"](self.hidden(x, adj)))
