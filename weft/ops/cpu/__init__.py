"""CPU kernels: what serves a CPU tensor, chosen by measurement (benchmarks/cpu_ops.py)."""

from __future__ import annotations

from torch import Tensor


def serves(*tensors: Tensor | None) -> bool:
    """Whether the compiled CPU kernels take these tensors; the torch reference serves the rest."""
    return False
