"""Room for large results on the host: in memory, or in a temporary file where that is short."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from weft.core.errors import OutOfMemoryError
from weft.core.machine.host_memory import free_host_bytes, host_bytes
from weft.core.units import show_bytes
from weft.runtime.batches.pinned import pinned

ACTIVATIONS = "what an evaluation keeps on the host between layers"
KEPT = 0.1  # of all memory that stays free for others, and of the disk's free bytes


def free_disk_bytes() -> int:
    """Of the folder for temporary files; 0 where that lies in memory."""
    folder = os.path.realpath(tempfile.gettempdir())
    return 0 if _in_memory(folder) else shutil.disk_usage(folder).free


def _in_memory(folder: str) -> bool:
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return False
    above = [(len(place), kind) for place, kind in mounts if Path(folder).is_relative_to(place)]
    return max(above, default=(0, ""))[1] in ("tmpfs", "ramfs")


def host_room(shape: tuple[int, ...], dtype: torch.dtype, pin: bool, what: str) -> Tensor:
    """An array in host memory, pinned if ``pin``; where there is not enough, in a file that goes with the array.

    ``what`` it is for: said where the disk is too small as well.
    """
    size = prod(shape) * dtype.itemsize
    if size <= max(_memory(), 0):
        made = torch.empty(shape, dtype=dtype)
        return pinned(made) if pin else made
    if size > _disk():
        raise OutOfMemoryError(too_little(size, what))
    try:
        with tempfile.NamedTemporaryFile(prefix="weft-") as file:  # the mapping keeps its bytes after its name is gone
            os.posix_fallocate(file.fileno(), 0, size)  # a disk that fills up later would end the process
            return torch.from_file(file.name, shared=True, size=prod(shape), dtype=dtype).view(shape)
    except OSError:
        raise OutOfMemoryError(too_little(size, what)) from None


def _memory() -> int:
    return free_host_bytes() - int(KEPT * host_bytes())


def _disk() -> int:
    return int((1 - KEPT) * free_disk_bytes())


def too_little(size: int, what: str) -> str:
    """What to say where neither memory nor disk has room."""
    free, disk = show_bytes(free_host_bytes()), show_bytes(free_disk_bytes())
    return (
        f"{what} takes {show_bytes(size)}, but the host has {free} of memory free and {tempfile.gettempdir()} {disk} "
        "of disk; point TMPDIR to a larger disk, train fewer tasks at once, or narrower ones"
    )


def fits_host(sizes: Iterable[int]) -> bool:
    """Whether there is room for arrays of so many bytes, one after another as :func:`host_room` places them."""
    memory, disk = _memory(), _disk()
    for size in sizes:
        if size <= memory:
            memory -= size
        elif size <= disk:
            disk -= size
        else:
            return False
    return True
