"""Import a module beside other work, so that it is there when it is needed."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from importlib import import_module


def import_early(name: str) -> threading.Thread | None:
    """Begin to import ``name`` in a thread, unless it was; whoever imports it meanwhile waits until it is there.

    It pays where this thread waits for something else, such as a GPU that starts. An error is left to whoever needs it.
    """
    if name in sys.modules:
        return None

    def work() -> None:
        with suppress(Exception):
            import_module(name)

    thread = threading.Thread(target=work, name=f"import {name}", daemon=True)
    thread.start()
    return thread
