"""The limits of a GPU that launch parameters depend on: multiprocessors, cache, shared memory.

Launch parameters were measured on an H200. They are written in terms of these limits, so that every number on an H200
is the one that was measured, and another GPU gets its own share: as many programs per multiprocessor, the same part of
its cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class DeviceLimits:
    """``sms`` multiprocessors, bytes of L2, bytes of shared memory that a block may ask for, threads resident per
    multiprocessor.
    """

    sms: int
    l2_bytes: int
    shared_memory_per_block: int
    max_threads_per_sm: int = 2048

    def programs(self, per_sm: int) -> int:
        """Programs that share all rows, so many per multiprocessor."""
        return per_sm * self.sms

    @property
    def l2_for_rows(self) -> int:
        """Bytes of gathered rows that stay in the L2, leaving room for indices and output: 48 MiB on an H200."""
        return self.l2_bytes * 4 // 5

    @property
    def l2_for_coefficients(self) -> int:
        """Bytes of coefficients that stay in the L2 between two passes: 50 MiB on an H200."""
        return self.l2_bytes * 5 // 6

    @property
    def l1_for_rows(self) -> int:
        """Bytes of rows that stay in an L1: half of it, the rest being shared memory. 128 KiB on an H200.

        Shared memory is carved out of the L1, whose size is the power of two above it.
        """
        return (1 << (self.shared_memory_per_block - 1).bit_length()) // 2


H200 = DeviceLimits(sms=132, l2_bytes=60 * 2**20, shared_memory_per_block=232448)
LEAST_SHARED = 101376  # of GPUs from 2020 on, if torch does not report it

_ASSUMED: ContextVar[DeviceLimits | None] = ContextVar("assumed device limits", default=None)


@contextmanager
def assume_limits(limits: DeviceLimits | None) -> Iterator[None]:
    """Inside, launches are chosen for a device with these ``limits``: the machine planned for, or a test's.

    None changes nothing.
    """
    token = _ASSUMED.set(limits if limits is not None else _ASSUMED.get())
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def limits_of(device: torch.device) -> DeviceLimits:
    """The limits of ``device``. Tensors without data, which stand for a GPU, have those of an H200 unless others are
    assumed; CUDA is not touched for them, nor for tensors on a CPU.
    """
    assumed = _ASSUMED.get()
    if assumed is not None:
        return assumed
    if device.type != "cuda":
        return H200
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _of_gpu(index: int) -> DeviceLimits:
    found = torch.cuda.get_device_properties(index)
    return DeviceLimits(
        sms=found.multi_processor_count,
        l2_bytes=int(getattr(found, "L2_cache_size", 0)) or H200.l2_bytes,
        shared_memory_per_block=getattr(found, "shared_memory_per_block_optin", LEAST_SHARED),
        max_threads_per_sm=getattr(found, "max_threads_per_multi_processor", H200.max_threads_per_sm),
    )
