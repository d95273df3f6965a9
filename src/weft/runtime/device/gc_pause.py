"""Garbage collection, put off while something runs that it would break or take longer than."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """No garbage is collected inside.

    Garbage may hold an older recording, and to destroy that breaks one under way. And while a step is taken down,
    hundreds of small objects set off collections that look through everything alive and find nothing.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
