"""Modules whose layers are wrapped by torch: norms of weights, parametrizations, ``torch.jit``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.runtime.user_modules.odd_modules import Base


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
