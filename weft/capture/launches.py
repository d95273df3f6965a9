"""Watching kernel launches instead of making them, so that launchers can be followed on tensors without data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from weft.ops.backend import have_triton
from weft.ops.lang import InertKernel

Seen = Callable[[str, list[Tensor]], None]


def _kernel_types() -> list[type]:
    """The classes whose instances are asked for a launch by ``kernel[grid](...)``."""
    if not have_triton():
        return [InertKernel]
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return [JITFunction, InterpretedFunction]


@contextmanager
def watched_launches(seen: Seen) -> Iterator[None]:
    """Inside, and in this thread, a launch calls ``seen(name, tensors handed over)`` and does nothing else."""
    thread = threading.get_ident()
    before = {kind: (kind.__dict__.get("__getitem__"), kind.__getitem__) for kind in _kernel_types()}
    for kind, (_, inherited) in before.items():
        kind.__getitem__ = _watching(inherited, thread, seen)
    try:
        yield
    finally:
        for kind, (own, _) in before.items():
            if own is None:
                del kind.__getitem__
            else:
                kind.__getitem__ = own


def _watching(inherited: Callable[[Any, Any], Any], thread: int, seen: Seen) -> Callable[[Any, Any], Any]:
    def getitem(kernel: Any, grid: Any) -> Any:
        if threading.get_ident() != thread:
            return inherited(kernel, grid)

        def launch(*args: Any, **options: Any) -> None:
            handed = [*args, *options.values()]
            seen(kernel.fn.__name__, [value for value in handed if isinstance(value, Tensor)])

        return launch

    return getitem
