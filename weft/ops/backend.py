"""Which implementation serves a tensor, and the few things Triton launches share."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor


@cache
def have_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def use_triton(tensor: Tensor) -> bool:
    """GPU tensors go to Triton kernels, others to the CPU path."""
    return tensor.is_cuda and have_triton()


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums run in float32, or in float64 for float64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def next_power_of_2(value: int) -> int:
    """Smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()
