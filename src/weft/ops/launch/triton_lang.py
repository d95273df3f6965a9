"""Triton's language and ``jit`` for Weft's kernels, imported by the first launch; without Triton inert stand-ins.

A run on a CPU launches no kernel, but imports the modules that hold them. So a kernel is a :class:`LazyKernel` until
it is launched, and ``tl`` stands for Triton's language until it is read. Triton's interpreter has kernels of another
kind; with ``TRITON_INTERPRET=1`` they are made at once.
"""

from __future__ import annotations

import os
from threading import RLock
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from weft.ops.launch.backend import have_triton
from weft.ops.launch.hooks import hooked, hooked_class

_WITHOUT_TRITON = SimpleNamespace(float32="float32", float64="float64")
_ONE_AT_A_TIME = RLock()
# Arguments that are bounds of loops or go into a hash: a version of their own for 1 or multiples of 16 gains nothing.
# They depend on the data (pieces of a work list) or on the place of a layer: there would be one per graph and layer.
COUNTS = frozenset({"num_heavy", "num_light", "num_partial", "parts", "runs", "site"})


class InertKernel:
    """A kernel without Triton: it has a name, and its launch can be intercepted but not made."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(f"{self.fn.__name__} is a Triton kernel, and Triton is not installed")


class LazyLanguage:
    """``triton.language``, imported when a name of it is read; in the globals of a kernel it becomes the module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_language(), name)


class LazyConstant:
    """A number that kernels read from their module: ``tl.constexpr`` once they are made."""

    def __init__(self, value: int) -> None:
        self.value = value


class LazyKernel:
    """A function that becomes Triton's kernel, in place, with its first launch or when an attribute of it is read.

    A launch that is intercepted (``hooks.py``) and not made leaves it as it is.
    """

    def __init__(self, fn: Any, **options: Any) -> None:
        self.fn, self._jit_options = fn, options
        self.do_not_specialize = options.get("do_not_specialize", ())
        self.__name__, self.__qualname__ = fn.__name__, fn.__qualname__
        self.__module__, self.__doc__ = fn.__module__, fn.__doc__

    def __getitem__(self, grid: Any) -> Any:
        make(self)
        return type(self).__mro__[1].__getitem__(self, grid)  # type: ignore[attr-defined]  # Triton's, below the hooked one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        make(self)
        return getattr(self, name)


def make(kernel: Any) -> None:
    """Turn a lazy kernel, and every kernel that it calls, into Triton's."""
    with _ONE_AT_A_TIME:
        if isinstance(kernel, LazyKernel):
            _make(kernel)


def _make(kernel: LazyKernel) -> None:
    from triton import jit as triton_jit

    fn, options = kernel.fn, kernel._jit_options
    kind = type(triton_jit(fn, **options))
    kernel.__class__ = hooked_class(kind)
    kernel.__dict__.clear()
    kernel.__init__(fn, **options)  # type: ignore[misc]
    # Make what the code of ``fn`` refers to: other kernels, by name or by module, the language, constants. The language
    # may be named in annotations alone, which the code does not know of, so it is replaced in any case.
    scope, names = fn.__globals__, fn.__code__.co_names
    modules = [vars(scope[name]) for name in names if isinstance(scope.get(name), ModuleType)]
    for space in (scope, *(module for module in modules if str(module.get("__name__")).startswith("weft."))):
        for name, value in list(space.items()):
            if isinstance(value, LazyLanguage):
                space[name] = _language()
            elif isinstance(value, LazyConstant):
                space[name] = _language().constexpr(value.value)
        for value in (space.get(name) for name in names):
            if isinstance(value, LazyKernel):
                _make(value)


def _language() -> Any:
    if not have_triton():
        return _WITHOUT_TRITON
    import triton.language

    return triton.language


def _interpreted() -> bool:
    return have_triton() and os.environ.get("TRITON_INTERPRET", "0") == "1"


def jit(fn: Any, **options: Any) -> Any:
    """Triton's ``jit``, when the kernel is needed; its launches can be intercepted (``hooks.py``)."""
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    plain = {*options.get("do_not_specialize", ()), *(name for name in names if name in COUNTS)}
    if plain:
        options["do_not_specialize"] = tuple(name for name in names if name in plain)
    if not _interpreted():
        return hooked(LazyKernel(fn, **options) if have_triton() else InertKernel(fn))
    from triton import jit as triton_jit

    return hooked(triton_jit(fn, **options))


def jit_any_size(*names: str) -> Any:
    """``triton.jit`` of a kernel that is not compiled again for other values of the arguments ``names``.

    Triton compiles a version of its own for sizes that are 1 or divisible by 16, and for pointers aligned to 16 bytes.
    Sizes of sampled batches change with every batch, and a new version would stop training for a second.
    """
    return lambda fn: jit(fn, do_not_specialize=names)


def cdiv(count: int, size: int) -> int:
    """Number of tiles of ``size`` that hold ``count``."""
    return -(-count // size)


def constant(value: int) -> Any:
    """A number that kernels may read from their module."""
    return _language().constexpr(value) if _interpreted() else LazyConstant(value)


tl: Any = _language() if _interpreted() else LazyLanguage()
triton = SimpleNamespace(jit=jit, cdiv=cdiv)


# ---- Helpers that the launchers of Triton kernels share: accumulation type, task strides, contiguous inputs.


def triton_acc(dtype: torch.dtype):
    """The accumulation type in Triton's terms."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def flatten_tasks(value: Tensor, keep: int) -> Tensor:
    """``[..., a, b]`` to contiguous ``[T, a, b]``, ``keep`` trailing dimensions kept."""
    lead = value.dim() - keep
    return value.reshape(value.shape[:lead].numel(), *value.shape[lead:]).contiguous()


def per_task_stride(value: Tensor | None, tasks: int, width: int) -> int:
    """Elements between two tasks' values, 0 if they share one (or there is none)."""
    return width if value is not None and tasks > 1 and value.numel() == tasks * width else 0


def common_lead(one: Tensor, other: Tensor) -> torch.Size:
    """The leading dimensions of ``one [..., a, b]`` and ``other [..., c, d]``, broadcast.

    Most are equal, or one has none; ``torch.broadcast_shapes`` would import sympy to find that out.
    """
    a, b = one.shape[:-2], other.shape[:-2]
    if a == b or not b:
        return a
    return b if not a else torch.broadcast_shapes(a, b)
