"""Begin what takes a while beside other work, such as a device that starts while modules are imported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


def beside(work: Callable[[], object], name: str) -> threading.Thread:
    """Call ``work`` in a thread called ``name``; an error is left to whoever needs what it makes.

    It pays for work that waits outside of Python. Two threads that both run Python only take it from each other: a
    thread that imported beside this one made a hundred short calls wait five milliseconds each.
    """

    def run() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
