"""How many bytes a worker holds, and how many its device has for tasks."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from weft.engine.base.machines import machine_with
from weft.engine.base.memory_budget import room


def room_for_tasks(device: str) -> int:
    """Bytes that groups may take on ``device``, as far as it is free now."""
    there = torch.device(device)
    return room(there, machine_with(there))


def held_bytes(device: str) -> int:
    """Bytes that this process holds: reserved on a GPU, resident on a CPU."""
    if device.startswith("cuda"):
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return int(torch.cuda.memory_reserved(device)) if begun else 0
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
