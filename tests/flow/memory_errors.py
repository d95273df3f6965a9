"""What torch and Python raise where memory runs out."""

from __future__ import annotations

import torch

from weft.core.errors import OutOfMemoryError

MEMORY_ERRORS = {
    "device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "host": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "small": lambda: RuntimeError("std::bad_alloc"),
    "context": lambda: RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    "kernel": lambda: RuntimeError("Triton Error [CUDA]: out of memory"),
    "handle": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "python": MemoryError,
    "weft": lambda: OutOfMemoryError("the batches take more than the host has"),
}
