"""Peer memory: bytes of a rank that other ranks can read, behind one interface.

Kinds: files in shared memory between CPU ranks; CUDA IPC between ranks on one host, also several ranks on one GPU
(``"ipc"``); torch's symmetric memory between distinct GPUs, by its own mappings (``"symmetric"``) or on NVSHMEM's heap
(``"nvshmem"``). Each rank writes to its own part only and reads those of others.

Every rank has two slots of equal size. An exchange writes to one of them, waits at a barrier and reads the peers' slot;
the next exchange uses the other one. A slot is written again only after the barrier of the exchange in between, which
every rank enters after it has read: so one barrier per exchange is enough.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.core.errors import InputError, OutOfMemoryError, SpecError, TrainingError
from weft.core.units import show_bytes

# ---- Torch's symmetric memory between distinct GPUs as peer memory: by mappings of its own, or on NVSHMEM's heap
#
# Torch has a backend per process, which its first allocation fixes. Nothing here uses a handle's barriers or signals:
# those of NVSHMEM return without waiting in some versions of torch (pytorch/pytorch issue 191858). Ranks wait at
# Weft's own barrier (:mod:`weft.dist.peer_memory`), after their GPU has finished.

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


PEERS = ("auto", "ipc", "symmetric", "nvshmem")
BACKENDS = {"symmetric": "CUDA", "nvshmem": "NVSHMEM"}  # torch's names
GatherObjects = Callable[[Any], list[Any]]


class PeerMemory(Protocol):
    """Bytes that peers can read; ``slots(rank)`` are two uint8 tensors of equal size per rank."""

    def reserve(self, num_bytes: int) -> None:
        """Have slots of at least ``num_bytes``; all ranks call this together, with the same number."""

    def slot(self, rank: int, which: int) -> Tensor:
        """Slot ``which`` of ``rank`` as uint8."""

    def close(self, together: bool) -> None:
        """Give the memory back; ``together``: all ranks do so, and none frees what another has open."""


def shared_folder() -> Path:
    """Where files live in memory, or the folder for temporary files if there is no such place."""
    place = Path("/dev/shm")
    return place if place.is_dir() and os.access(place, os.W_OK) else Path(tempfile.gettempdir())


def map_shared(path: Path, num_bytes: int, create: bool) -> Tensor:
    """A uint8 tensor over the file ``path``, made at that size if ``create``."""
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
    handle = os.open(path, flags, 0o600)
    try:
        if create:
            os.posix_fallocate(handle, 0, num_bytes)  # else a full folder would kill the process at the first write
        view = mmap.mmap(handle, num_bytes)
    except OSError as error:
        if create:
            path.unlink(missing_ok=True)
        raise OutOfMemoryError(
            f"cannot have {show_bytes(num_bytes)} of shared memory in {path.parent}: {error.strerror}; "
            "use fewer ranks or members, or make the folder larger"
        ) from None
    finally:
        os.close(handle)
    return torch.frombuffer(view, dtype=torch.uint8)


def shared_counters(rank: int, count: int, gather: GatherObjects) -> Tensor:
    """``count`` int64 zeros that all ranks of a host share."""
    path = shared_folder() / f"weft-{uuid.uuid4().hex}"
    own = map_shared(path, count * 8, create=True) if rank == 0 else None
    if own is not None:
        own.zero_()
    first = Path(gather(str(path))[0])
    counters = own if own is not None else map_shared(first, count * 8, create=False)
    gather(None)  # everybody has it open
    if rank == 0:
        path.unlink(missing_ok=True)
    return counters.view(torch.int64)


class SharedFiles:
    """CPU ranks: files in shared memory, unlinked as soon as all ranks have them open, so that none is left behind."""

    def __init__(self, rank: int, gather: GatherObjects) -> None:
        self._rank, self._gather = rank, gather
        self._parts: list[list[Tensor]] = []
        self._size = 0

    def reserve(self, num_bytes: int) -> None:
        """Grow to ``num_bytes`` per slot, if that is more than there is."""
        if num_bytes <= self._size:
            return
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        path = shared_folder() / f"weft-{uuid.uuid4().hex}"
        own = map_shared(path, SLOTS * size, create=True)
        paths = self._gather(str(path))
        wholes = [
            own if rank == self._rank else map_shared(Path(other), SLOTS * size, create=False)
            for rank, other in enumerate(paths)
        ]
        self._gather(None)
        path.unlink(missing_ok=True)
        self._parts, self._size = [list(whole.split(size)) for whole in wholes], size

    def slot(self, rank: int, which: int) -> Tensor:
        """Slot ``which`` of ``rank``."""
        return self._parts[rank][which]

    def close(self, together: bool) -> None:
        """Unmap everything: the pages go with the last rank that has them mapped."""
        self._parts, self._size = [], 0


class CudaIpc:
    """Ranks on GPUs of one host, also several on one GPU: a CUDA allocation of each, opened by the others.

    A handle of torch's is for one reader: it counts readers, and what it is a handle of is freed once they are gone. So
    there is one per peer. Memory that others have open is dropped by all of them before its owner frees it.
    """

    def __init__(self, rank: int, ranks: int, gather: GatherObjects, device: torch.device) -> None:
        self._rank, self._ranks, self._gather, self._device = rank, ranks, gather, device
        self._parts: list[list[Tensor]] = []
        self._size = 0

    def reserve(self, num_bytes: int) -> None:
        """Grow to ``num_bytes`` per slot, if that is more than there is."""
        if num_bytes <= self._size:
            return
        self.close(together=True)
        size = -(-num_bytes // 512) * 512
        own = torch.empty(SLOTS * size, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        every = self._gather(self._handles(own))
        wholes = [own if rank == self._rank else self._open(given[self._rank]) for rank, given in enumerate(every)]
        self._gather(None)  # everybody has everything open
        self._parts, self._size = [list(whole.split(size)) for whole in wholes], size

    def _handles(self, own: Tensor) -> list[Any]:
        """One handle per peer, and None for this rank, which must not open its own."""
        from torch.multiprocessing.reductions import reduce_tensor

        return [None if rank == self._rank else reduce_tensor(own) for rank in range(self._ranks)]

    @staticmethod
    def _open(handle: Any) -> Tensor:
        make, arguments = handle
        whole: Tensor = make(*arguments)
        return whole

    def slot(self, rank: int, which: int) -> Tensor:
        """Slot ``which`` of ``rank``; on the device of that rank."""
        return self._parts[rank][which]

    def close(self, together: bool) -> None:
        """Close what is open of others, then free one's own."""
        if not self._parts:
            return
        torch.cuda.synchronize(self._device)  # nothing reads peers' memory any more
        own = self._parts[self._rank]
        self._parts, self._size = [], 0
        if together:
            self._gather(None)
        del own
        torch.cuda.ipc_collect()


def check_peers(peers: str, device: torch.device, distinct: bool) -> None:
    """A :class:`SpecError` or :class:`InputError` for a kind of peer memory that there is not, or that cannot be had.

    ``distinct``: no two ranks are on one GPU.
    """
    if peers not in PEERS:
        raise SpecError(f"peers={peers!r} must be one of {', '.join(PEERS)}")
    if peers == "auto":
        return
    if device.type != "cuda":
        raise SpecError(f"peers={peers!r} is memory of GPUs; ranks on a CPU share files in memory: leave it out")
    if peers in BACKENDS and not distinct:
        raise SpecError(
            f"peers={peers!r} needs a GPU per rank, and here ranks share one; use peers='ipc', or leave it out"
        )
    if peers in BACKENDS:
        check_backend(BACKENDS[peers])


def peer_memory_for(
    rank: int, ranks: int, device: torch.device, distinct: bool, gather: GatherObjects, peers: str = "auto"
) -> PeerMemory:
    """The kind that suits ``device``, or the one that was asked for; ``distinct``: no two ranks are on one GPU."""
    check_peers(peers, device, distinct)
    if device.type != "cuda":
        return SharedFiles(rank, gather)
    if peers in BACKENDS:
        return Symmetric(rank, ranks, device, BACKENDS[peers])
    if peers == "auto" and distinct and is_available():
        return Symmetric(rank, ranks, device)
    return CudaIpc(rank, ranks, gather, device)


# ---- Barrier: ranks of one host wait for each other through counters in shared memory.
#
# A rank that has died is noticed while it is waited for, so a run ends with an error within seconds instead of
# hanging.

# ---- What goes wrong between ranks


class RankLostError(TrainingError):
    """A rank is gone, or did not arrive in time: the run cannot go on."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


LOOK_SECONDS = 0.2  # between two looks at whether a late rank is alive
SPINS = 200  # polls before a wait begins to sleep


def is_alive(pid: int) -> bool:
    """Whether a process with this id is there and has not ended."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rsplit(")", 1)[-1].split()[0] != "Z"
    except (OSError, IndexError):
        return True


class Barrier:
    """``counters [ranks]`` int64 in shared memory, one per rank; ``pids`` are the processes behind them.

    :meth:`wait` returns once every rank has called it as often. What a rank wrote to shared memory before is then
    visible to all (a GPU's work has to be finished first: ``before`` is called for that).
    """

    def __init__(
        self,
        counters: Tensor,
        rank: int,
        pids: Sequence[int],
        timeout: float,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._counters, self._numbers = counters, counters.numpy()
        self._rank, self._pids, self._timeout, self._before = rank, tuple(pids), timeout, before
        self._count = 0

    def wait(self) -> None:
        """Arrive, and wait for all others."""
        if self._before is not None:
            self._before()
        self._count += 1
        self._numbers[self._rank] = self._count
        spins, begin, looked = 0, 0.0, 0.0
        while (self._numbers < self._count).any():
            spins += 1
            if spins < SPINS:
                continue
            now = time.monotonic()
            begin = begin or now
            if now - looked > LOOK_SECONDS:
                self._check(now - begin)
                looked = now
            time.sleep(2e-5 if now - begin < 0.01 else 5e-4)

    def late(self) -> list[int]:
        """The ranks that have not arrived."""
        return [rank for rank in range(len(self._pids)) if self._numbers[rank] < self._count]

    def dead(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [rank for rank, pid in enumerate(self._pids) if rank != self._rank and not is_alive(pid)]

    def _check(self, waited: float) -> None:
        gone = [rank for rank in self.dead() if rank in self.late()]
        if gone:
            raise RankLostError(f"rank {gone[0]} of {len(self._pids)} has died; the run cannot go on", gone[0])
        if waited > self._timeout:
            late = self.late()[0]
            raise RankLostError(
                f"rank {late} of {len(self._pids)} did not arrive within {self._timeout:g} s; the run cannot go on",
                late,
            )
