"""Torch's symmetric memory between distinct GPUs as peer memory: by mappings of its own, or on NVSHMEM's heap.

Torch has a backend per process, which its first allocation fixes. Nothing here uses a handle's barriers or signals:
those of NVSHMEM return without waiting in some versions of torch (pytorch/pytorch issue 191858). Ranks wait at Weft's
own barrier (:mod:`weft.dist.barrier`), after their GPU has finished.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError, OutOfMemoryError
from weft.core.units import show_bytes

SLOTS = 2  # of every rank: see weft.dist.peer_memory


def is_available() -> bool:
    """Whether this torch has symmetric memory."""
    return hasattr(_torch_module(), "rendezvous")


def has_nvshmem() -> bool:
    """Whether this torch was built with NVSHMEM, and finds its library here."""
    asked = getattr(_torch_module(), "is_nvshmem_available", None)
    return asked is not None and bool(asked())


def check_backend(backend: str) -> None:
    """An :class:`InputError` if symmetric memory cannot be had by ``backend``, ``"CUDA"`` or ``"NVSHMEM"``."""
    if not is_available():
        raise InputError(f"torch {torch.__version__} has no symmetric memory; use peers='ipc', or leave it out")
    if backend == "NVSHMEM" and not has_nvshmem():
        raise InputError(
            f"peers='nvshmem': torch {torch.__version__} has no NVSHMEM here (it needs a build with it and "
            "libnvshmem_host, as in the package nvidia-nvshmem-cu13); use peers='symmetric', or leave it out"
        )


def _torch_module() -> Any:
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory


class Symmetric:
    """Ranks on distinct GPUs that torch's symmetric memory connects (NVLink); needs an NCCL process group."""

    def __init__(self, rank: int, ranks: int, device: torch.device, backend: str = "CUDA") -> None:
        check_backend(backend)
        self._rank, self._ranks, self._device, self.backend = rank, ranks, device, backend
        self._parts: list[list[Tensor]] = []
        self._size = 0
        if backend != "CUDA":
            self._choose_backend()

    def _choose_backend(self) -> None:
        try:
            _torch_module().set_backend(self.backend)
        except RuntimeError as error:
            raise InputError(
                f"peers={self.backend.lower()!r}: torch does not change to this kind of symmetric memory in this "
                f"process ({_first_line(error)}); start another process, or leave it out"
            ) from None

    def reserve(self, num_bytes: int) -> None:
        """Grow to ``num_bytes`` per slot, if that is more than there is."""
        if num_bytes <= self._size:
            return
        import torch.distributed as dist

        self._parts, self._size = [], 0  # a heap of fixed size has room for the new ones only after that
        size = -(-num_bytes // 512) * 512
        own = self._allocate(SLOTS * size)
        handle = _torch_module().rendezvous(own, dist.group.WORLD) if self._ranks > 1 else None
        shape = (SLOTS * size,)
        wholes = [
            own if rank == self._rank else handle.get_buffer(rank, shape, torch.uint8) for rank in range(self._ranks)
        ]
        self._parts, self._size = [list(whole.split(size)) for whole in wholes], size

    def _allocate(self, num_bytes: int) -> Tensor:
        try:
            found: Tensor = _torch_module().empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            more = "; its heap has NVSHMEM_SYMMETRIC_SIZE bytes" if self.backend == "NVSHMEM" else ""
            raise OutOfMemoryError(
                f"cannot have {show_bytes(num_bytes)} of symmetric memory ({_first_line(error)}){more}; "
                "use more ranks, or fewer members"
            ) from None
        return found

    def slot(self, rank: int, which: int) -> Tensor:
        """Slot ``which`` of ``rank``."""
        return self._parts[rank][which]

    def close(self, together: bool) -> None:
        """Give the memory back."""
        self._parts, self._size = [], 0


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
