"""Triton's language if it is installed, else inert stand-ins; and ``triton.jit`` for Weft's kernels.

A machine without a GPU needs no Triton to train. There kernels are never launched, but the modules that hold them are
imported.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weft.ops.launch.backend import have_triton
from weft.ops.launch.hooks import hooked


class InertKernel:
    """A kernel without Triton: it has a name, and its launch can be intercepted but not made."""

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


def jit(fn: Any, **options: Any) -> Any:
    """Triton's ``jit``; launches of the kernel can be intercepted (``hooks.py``)."""
    return hooked(_jit(fn, **options) if have_triton() else InertKernel(fn))


def jit_any_size(*names: str) -> Any:
    """``triton.jit`` of a kernel that is not compiled again for other values of the arguments ``names``.

    Triton compiles a version of its own for sizes that are 1 or divisible by 16, and for pointers aligned to 16 bytes.
    Sizes of sampled batches change with every batch, and a new version would stop training for a second.
    """
    return lambda fn: jit(fn, do_not_specialize=names)


def cdiv(count: int, size: int) -> int:
    """Number of tiles of ``size`` that hold ``count``."""
    return -(-count // size)


triton = SimpleNamespace(jit=jit, cdiv=cdiv)

__all__ = ["InertKernel", "jit_any_size", "tl", "triton"]
