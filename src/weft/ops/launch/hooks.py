"""Intercept kernel launches of Weft's own kernels: watch them, collect them, or make them as they are.

Only kernels made by :func:`hooked` (all of Weft's) check for interceptors; Triton's own classes are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

# interceptor(kernel, grid, launch): a callable that takes the arguments of the launch; ``launch`` makes it.
Interceptor = Callable[[Any, Any, Callable[..., Any]], Callable[..., Any]]
_INTERCEPTORS: ContextVar[tuple[Interceptor, ...]] = ContextVar("weft_interceptors", default=())


# recorder(kernel, args, options): is told every launch, before it is made or intercepted
Recorder = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_RECORDER: ContextVar[Recorder | None] = ContextVar("weft_launch_recorder", default=None)


@contextmanager
def recorded(recorder: Recorder | None) -> Iterator[None]:
    """Inside, and in this thread, ``recorder`` is told the arguments of every launch; None: nobody is."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


@contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """Inside, and in this thread, ``kernel[grid]`` is ``interceptor(kernel, grid, launch)``."""
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
        found = _launch(kind.__getitem__, kernel, grid, _INTERCEPTORS.get())  # type: ignore[attr-defined]
        recorder = _RECORDER.get()
        return found if recorder is None else _told(recorder, kernel, found)

    return type(kind.__name__, (kind,), {"__getitem__": launcher, "__module__": kind.__module__})


def _told(recorder: Recorder, kernel: Any, launch: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        recorder(kernel, args, options)
        return launch(*args, **options)

    return call


def _launch(launch: Callable[[Any, Any], Any], kernel: Any, grid: Any, interceptors: tuple[Interceptor, ...]) -> Any:
    """Call the innermost interceptor; its ``launch`` is the next one, or the launch itself."""
    if not interceptors:
        return launch(kernel, grid)
    rest = interceptors[:-1]
    # Looked up when it is called: without Triton a kernel has no launch at all.
    return interceptors[-1](
        kernel, grid, lambda *args, **options: _launch(launch, kernel, grid, rest)(*args, **options)
    )
