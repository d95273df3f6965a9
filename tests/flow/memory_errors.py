"""What torch and Python raise where memory runs out."""

from __future__ import annotations

import torch

from weft.core.errors import OutOfMemoryError

MEMORY_ERRORS = {
    "device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "host": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "small": lambda: RuntimeError("std::bad_alloc"),
    "python": MemoryError,
    "weft": lambda: OutOfMemoryError("the batches take more than the host has"),
}
