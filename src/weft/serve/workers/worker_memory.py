"""How many bytes a worker holds, how many its device has for tasks, and a limit on what a group may take of a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows: no limit
    resource = None  # type: ignore[assignment]

from weft.engine.base.machines import machine_with
from weft.engine.base.memory_budget import room
from weft.serve.options import LEFTOVER_BYTES


def room_for_tasks(device: str) -> int:
    """Bytes that groups may take on ``device``, as far as it is free now."""
    there = torch.device(device)
    return room(there, machine_with(there))


def bytes_beside(device: str) -> int:
    """Bytes of a GPU that a worker may hold between groups beside graphs: CUDA's context, workspaces. 0 on a CPU."""
    if not device.startswith("cuda"):
        return 0
    return machine_with(torch.device(device)).context_bytes + LEFTOVER_BYTES


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


@contextmanager
def byte_limit(device: str, limit: int | None) -> Iterator[None]:
    """Inside, allocations of a CPU worker fail once it has ``limit`` bytes more than now, small ones included.

    The failure is an error in the task that asked for the memory. A GPU has a cap of its own. The system counts
    private writable memory, mapped or not yet touched, so ``limit`` has to leave room for threads and libraries.
    """
    if limit is None or device.startswith("cuda") or resource is None or (now := _data_bytes()) is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    highest = before[1] if before[1] != resource.RLIM_INFINITY else now + limit
    resource.setrlimit(resource.RLIMIT_DATA, (min(now + limit, highest), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int | None:
    """What this process has of private writable memory; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
