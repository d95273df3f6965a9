"""Disable Python's garbage collection while a CUDA graph is captured or a step is traced."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """No garbage is collected inside.

    A collection could free an older CUDA graph, which breaks a capture in progress. And while a step is traced,
    hundreds of small objects trigger collections that scan every live object and find nothing.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
