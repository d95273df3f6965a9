"""Record the names of the operators that are called, for tests."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Names(TorchDispatchMode):
    """Inside, collects the names of operators without their overloads: ``weft::linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.met.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))
