"""Choose the implementation for a tensor (Triton or CPU), and helpers that Triton launches share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor


@cache
def have_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


_META_MEANS_GPU = ContextVar("meta means GPU", default=False)


@contextmanager
def meta_means_gpu(yes: bool = True) -> Iterator[None]:
    """Inside, tensors on the ``meta`` device (sizes without data) take the path that GPU tensors would take.

    So a step can be dry-run, allocation by allocation, as a GPU would run it, on a machine without one.
    """
    token = _META_MEANS_GPU.set(yes)
    try:
        yield
    finally:
        _META_MEANS_GPU.reset(token)


def on_gpu(tensor: Tensor) -> bool:
    """Whether ``tensor`` is on a GPU, or on meta in place of one: see :func:`meta_means_gpu`."""
    return tensor.is_cuda or (tensor.is_meta and _META_MEANS_GPU.get())


def use_triton(tensor: Tensor) -> bool:
    """GPU tensors go to Triton kernels, others to the CPU path."""
    return on_gpu(tensor) and (have_triton() or tensor.is_meta)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums run in float32, or in float64 for float64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def next_power_of_2(value: int) -> int:
    """Smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()
