"""Modules that count their calls and begin or change something later: warm-up, curriculum."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from tests.runtime.user_modules.kept.far import far
from tests.runtime.user_modules.odd_modules import Base


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


class EpochLengths(Base):
    """Switches its arithmetic by how often it was evaluated."""

    evaluated = 0

    def forward(self, x, adj):
        self.evaluated += not self.training
        h = self.hidden(x, adj)
        return self.last(h if self.evaluated < 5 else h.square())
