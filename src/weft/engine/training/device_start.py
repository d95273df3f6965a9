"""Start a GPU and load operators of torch while Triton is imported and the first group is built."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from threading import Thread

import torch

from weft.core.lazy.early import beside
from weft.core.lazy.names import gc_paused
from weft.ops.launch.backend import have_triton
from weft.runtime.device.first_operators import load_operators


class DeviceStart:
    """What the first run of a process on ``device`` begins with; nothing on a CPU, or where a run was before."""

    def __init__(self, device: torch.device) -> None:
        self._thread: Thread | None = None
        if device.type == "cuda" and "triton" not in sys.modules and have_triton():
            self._thread = beside(partial(load_operators, device), "start of the device")
            with gc_paused(), suppress(ImportError):  # whoever needs it says what is missing
                import_module("triton")

    def wait(self) -> None:
        """Return when all is loaded: a capture minds what other threads do with the device meanwhile."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
