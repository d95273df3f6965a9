"""Pinned host memory, which a GPU reads by itself; large tensors are pinned where they lie, copies in huge pages."""

from __future__ import annotations

import weakref
from contextlib import suppress

import torch
from torch import Tensor

from weft.core.machine.huge_pages import advise_huge_pages

LARGE = 1 << 25  # bytes from which on a copy gets huge pages
IN_PLACE = 1 << 30  # bytes from which on a tensor is pinned where it is: a copy would need as much memory again


def pinned(tensor: Tensor) -> Tensor:
    """``tensor`` in pinned host memory: itself if it is there, or pinned where it lies, or a copy."""
    if not tensor.is_cuda and tensor.is_pinned():
        return tensor
    size = tensor.numel() * tensor.element_size()
    if size < LARGE:
        return tensor.cpu().contiguous().pin_memory()
    if size < IN_PLACE or tensor.is_cuda or not tensor.is_contiguous():
        host = touched(tensor.shape, tensor.dtype)
        return (host if register(host) else host.pin_memory()).copy_(tensor)
    return tensor if register(tensor) else tensor.pin_memory()


def touched(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Zeros on the host, in huge pages if the system has them.

    All threads touch the pages: the driver would do that by itself when it pins them, one page at a time.
    """
    host = torch.empty(shape, dtype=dtype, device="cpu")
    advise_huge_pages(host.data_ptr(), host.numel() * host.element_size())
    return host.fill_(0)


def register(tensor: Tensor) -> bool:
    """Pin the memory of a CPU tensor where it lies, for as long as the storage lives; returns whether that worked."""
    runtime, storage = torch.cuda.cudart(), tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if int(runtime.cudaHostRegister(address, size, 0)) != 0:
        _forget_error()
        return False
    weakref.finalize(storage, _unregister, address)
    return True


def _unregister(address: int) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _forget_error()


def _forget_error() -> None:
    """The next launch reports the error of a call that failed before it: let that be this one."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
