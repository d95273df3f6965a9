"""Disable Python's garbage collection while a CUDA graph is captured or a step is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.core.lazy.collector import no_collections


@contextmanager
def gc_disabled() -> Iterator[None]:
    """No garbage is collected inside, by any thread.

    A collection could free an older CUDA graph, which breaks a capture in progress. And while a step is traced,
    hundreds of small objects trigger collections that scan every live object and find nothing.
    """
    with no_collections():
        yield
