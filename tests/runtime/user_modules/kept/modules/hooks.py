"""Modules whose hooks keep or count something."""

from __future__ import annotations

import torch

from tests.runtime.user_modules.kept.far import far
from tests.runtime.user_modules.odd_modules import Base


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
