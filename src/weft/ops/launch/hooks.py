"""Intercept launches of Weft's own kernels, and note which versions of kernels they need.

Only kernels made by :func:`hooked` (all of Weft's) check for interceptors; Triton's own classes are unchanged.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

# interceptor(kernel, grid, launch): a callable that takes the arguments of the launch; ``launch`` makes it.
Interceptor = Callable[[Any, Any, Callable[..., Any]], Callable[..., Any]]
_INTERCEPTORS: ContextVar[tuple[Interceptor, ...]] = ContextVar("weft_interceptors", default=())


@contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """In this thread, make ``kernel[grid]`` be ``interceptor(kernel, grid, launch)``."""
    token = _INTERCEPTORS.set((*_INTERCEPTORS.get(), interceptor))
    try:
        yield
    finally:
        _INTERCEPTORS.reset(token)


def hooked(kernel: Any) -> Any:
    """``kernel`` with launches that can be intercepted: its class becomes a subclass of the one it has."""
    kernel.__class__ = hooked_class(type(kernel))
    return kernel


@cache
def hooked_class(kind: type) -> type:
    """A subclass of ``kind``, a class of kernels, whose launches can be intercepted."""

    def launcher(kernel: Any, grid: Any) -> Any:
        launch = _launch(kind.__getitem__, kernel, grid, _INTERCEPTORS.get())  # type: ignore[attr-defined]
        versions = _VERSIONS.get()
        if versions is None:
            return launch

        def noted(*args: Any, **options: Any) -> Any:
            versions.setdefault(KernelVersion.of(kernel, args, options))
            return launch(*args, **options)

        return noted

    return type(kind.__name__, (kind,), {"__getitem__": launcher, "__module__": kind.__module__})


def _launch(launch: Callable[[Any, Any], Any], kernel: Any, grid: Any, interceptors: tuple[Interceptor, ...]) -> Any:
    """Call the innermost interceptor; its ``launch`` is the next one, or the launch itself."""
    if not interceptors:
        return launch(kernel, grid)
    rest = interceptors[:-1]
    # Looked up when it is called: without Triton a kernel has no launch at all.
    return interceptors[-1](
        kernel, grid, lambda *args, **options: _launch(launch, kernel, grid, rest)(*args, **options)
    )


# ---- Versions: what Triton compiles for one launch: the kernel, the kinds of its arguments, its constants.
#
# Triton compiles a version of its own for other types and constants, for integers that are 1 or divisible by 16, and
# for pointers that are aligned to 16 bytes. A launch on meta tensors has all of that, so the versions of a step are
# known before it runs.

ALIGNED = 16  # bytes; and the divisor of integers


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor in a compilation: its type, and whether its address is aligned."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        """An address of that kind."""
        return 0 if self.aligned else 4

    @staticmethod
    def ptr_range() -> int:
        """Not known."""
        return 0


@dataclass(frozen=True)
class KernelVersion:
    """A kernel with arguments as Triton sees them; tensors are Pointers, integers stand for all of their kind."""

    kernel: Any
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> KernelVersion:
        """The version that ``kernel[grid](*args, **options)`` needs."""
        names, constants = _parameters(kernel.fn)
        plain = frozenset(getattr(kernel, "do_not_specialize", ()) or ())  # one version for all values
        kinds = tuple(
            value if name in constants else _kind(value, name in plain)
            for name, value in zip(names, args, strict=False)
        )
        named = {
            name: value if name in constants or name not in names else _kind(value, name in plain)
            for name, value in options.items()
        }
        return cls(kernel, kinds, tuple(sorted(named.items(), key=lambda pair: pair[0])))

    @property
    def name(self) -> str:
        """Of the kernel."""
        return str(self.kernel.fn.__name__)

    @property
    def digest(self) -> str:
        """Equal for equal versions, in every process; the code of the kernel does not count."""
        where = f"{self.kernel.fn.__module__}.{self.name}"
        text = repr((where, self.args, self.options))
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of a kernel's parameters, and those that are constants to Triton."""
    parameters = inspect.signature(function).parameters
    constants = (name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation))
    return tuple(parameters), frozenset(constants)


def _kind(value: Any, plain: bool) -> Any:
    """One value that stands for all that share a version with ``value``."""
    if isinstance(value, Tensor):
        return Pointer(value.dtype, value.storage_offset() * value.element_size() % ALIGNED == 0)
    if isinstance(value, float):
        return 0.5
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    wide = 0 if -(2**31) <= value < 2**31 else 2**40
    if not plain and value == 1:
        return 1
    return wide + (ALIGNED if not plain and value % ALIGNED == 0 else 3)


_VERSIONS: ContextVar[dict[KernelVersion, None] | None] = ContextVar("weft_kernel_versions", default=None)


@contextmanager
def kernel_versions() -> Iterator[dict[KernelVersion, None]]:
    """Note the versions that launches in this thread need in the dictionary that this yields."""
    versions: dict[KernelVersion, None] = {}
    token = _VERSIONS.set(versions)
    try:
        yield versions
    finally:
        _VERSIONS.reset(token)
