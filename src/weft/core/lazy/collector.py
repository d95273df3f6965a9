"""Python's garbage collector, of which a process has one: threads pause it at the same time, and inside each other."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MOST_SECONDS = 1.0  # to wait for a collection of another thread, which may itself wait for this one


class _Pauses:
    """How many pauses are under way, whether there were collections before the first, and which thread collects."""

    lock = threading.Lock()
    count = 0
    collected = True
    collector = 0


def _note(phase: str, info: dict[str, Any]) -> None:
    _Pauses.collector = threading.get_ident() if phase == "start" else 0


gc.callbacks.append(_note)


@contextmanager
def no_collections() -> Iterator[None]:
    """No thread collects garbage inside, whatever pauses of other threads begin or end meanwhile.

    A collection that another thread is at (it lets others run where it calls finalizers) is waited for.
    """
    with _Pauses.lock:
        if not _Pauses.count:
            _Pauses.collected = gc.isenabled()
        _Pauses.count += 1
        gc.disable()
    try:
        _wait_for_others()
        yield
    finally:
        with _Pauses.lock:
            _Pauses.count -= 1
            if not _Pauses.count and _Pauses.collected:
                gc.enable()


def _wait_for_others() -> None:
    until = time.monotonic() + MOST_SECONDS
    while _Pauses.collector not in (0, threading.get_ident()) and time.monotonic() < until:
        time.sleep(0.0005)


def collects() -> bool:
    """Whether garbage is collected, but for pauses."""
    with _Pauses.lock:
        return _Pauses.collected if _Pauses.count else gc.isenabled()


def let_collect(wanted: bool) -> None:
    """Collect garbage from now on, or do not; pauses that are under way end first."""
    with _Pauses.lock:
        _Pauses.collected = wanted
        if not _Pauses.count:
            (gc.enable if wanted else gc.disable)()
