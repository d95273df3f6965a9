"""Modules with unusual arithmetic: Fourier filters, other types, ``torch.func``, rounding, inner steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.user_modules.odd_modules import Base


class FFTFilter(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.filt = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(torch.fft.irfft(torch.fft.rfft(h) * self.filt, n=8))


class DoubleInside(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj).double()
        return F.linear(h, self.last.weight.double(), self.last.bias.double()).float()


class AutocastInside(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.last(h)
        return z.float()


class Vmap(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return torch.func.vmap(lambda r: self.last(r) - r.mean())(h)


class STE(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        q = (h * 4).round() / 4
        return self.last(h + (q - h).detach())


class Meta(Base):
    """MAML-like inner step"""

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        with torch.enable_grad():
            ps = dict(self.last.named_parameters())
            if not self.training:
                return self.last(h)
            inner = torch.func.functional_call(self.last, ps, (h,)).square().mean()
            g = torch.autograd.grad(inner, list(ps.values()), create_graph=True)
            ps = {k: p - 0.1 * gg for (k, p), gg in zip(ps.items(), g, strict=True)}
        return torch.func.functional_call(self.last, ps, (h,))
