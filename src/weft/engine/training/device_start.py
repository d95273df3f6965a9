"""Start a GPU, which takes a tenth of a second, while Triton is imported, which takes as long."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from importlib import import_module

import torch

from weft.core.lazy.early import beside
from weft.core.lazy.names import gc_paused
from weft.ops.launch.backend import have_triton


def start_device(device: torch.device) -> None:
    """What the first run of a process on ``device`` begins with; nothing on a CPU, or where a run was before."""
    if device.type == "cuda" and "triton" not in sys.modules and have_triton():
        beside(partial(torch.cuda.synchronize, device), "start of the device")
        with gc_paused(), suppress(ImportError):  # whoever needs it says what is missing
            import_module("triton")
