"""Triton's language where it is installed, inert stand-ins where it is not, and ``triton.jit`` for Weft's kernels.

A machine without a GPU needs no Triton to train. There kernels are never launched, but the modules that hold them are
imported.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weft.ops.launch.backend import have_triton
from weft.ops.launch.hooks import hooked


class InertKernel:
    """What a kernel is where Triton is missing: it has a name and its launch can be intercepted, not made."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(f"{self.fn.__name__} is a Triton kernel, and Triton is not installed")


if have_triton():
    import triton.language as tl
    from triton import jit as _jit
else:
    _jit = InertKernel  # type: ignore[assignment]
    tl: Any = SimpleNamespace(float32="float32", float64="float64")  # type: ignore[no-redef]


def jit(fn: Any) -> Any:
    """Triton's ``jit``; launches of the kernel can be intercepted (``hooks.py``)."""
    return hooked(_jit(fn))


triton = SimpleNamespace(jit=jit)

__all__ = ["InertKernel", "tl", "triton"]
