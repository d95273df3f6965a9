"""Modules that draw random numbers: from generators of their own, in the constructor, once, or in each call."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from tests.runtime.user_modules.odd_modules import Base


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


class StochasticDepth(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.deep = nn.Linear(8, 8)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        keep = (torch.rand(()) < 0.7).float() / 0.7 if self.training else 1.0
        return self.last(h + keep * self.deep(h))


class NoiseOfFirstCall(Base):
    noise = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.noise is None:
            self.noise = torch.randn(8)
        return self.last(h + self.noise)


class NumpyInConstructor(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.scale = np.random.rand(8).astype("float32")

    def forward(self, x, adj):
        return self.last(self.hidden(x, adj) * torch.from_numpy(self.scale))
