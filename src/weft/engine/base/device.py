"""Choose the device of a run, and describe its environment."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from weft.core.errors import SpecError
from weft.core.machine.device_names import check_device_name
from weft.core.version import __version__
from weft.engine.base.home import machine_name


def choose_device(wanted: str | torch.device = "auto") -> torch.device:
    """``"auto"`` is the GPU if there is one; ``"cpu"``, ``"cuda"`` and ``"cuda:1"`` are what they say."""
    if str(wanted) == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    check_device_name(str(wanted))
    device = torch.device(wanted)
    if device.type == "cuda":
        device = _cuda(device)
    return device


def _cuda(device: torch.device) -> torch.device:
    if not torch.cuda.is_available():
        raise SpecError(f"device {str(device)!r}: torch finds no CUDA device here; use auto or cpu")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise SpecError(f"device 'cuda:{index}': there are {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """The device in words: the GPU's name, or the processor and the threads torch uses of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads)"


def machine_of(device: torch.device) -> str:
    """What this host with ``device`` is called where something is kept of it (``weft.engine.base.home``)."""
    return machine_name(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")


def environment(device: torch.device) -> dict[str, Any]:
    """What one has to know to reproduce a number."""
    found: dict[str, Any] = {
        "weft": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.system(),
        "device": device_name(device),
    }
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
    return found
