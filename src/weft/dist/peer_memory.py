"""Peer memory: bytes of a rank that other ranks can read, and the barrier at which the ranks of a host wait.

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
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError, OutOfMemoryError, SpecError, TrainingError
from weft.core.run_options import RunOptions
from weft.core.units import show_bytes
from weft.core.wording import option

SLOTS = 2  # of every rank
BACKENDS = {"symmetric": "CUDA", "nvshmem": "NVSHMEM"}  # torch's names
GatherObjects = Callable[[Any], list[Any]]


class PeerMemory:
    """Bytes that peers can read: two slots of equal size per rank. A subclass allocates them."""

    unit = 512  # bytes of which a slot is a multiple

    def __init__(self) -> None:
        self._parts: list[list[Tensor]] = []
        self._size = 0

    def allocate(self, num_bytes: int) -> list[Tensor]:
        """``num_bytes`` of every rank as uint8, in the order of the ranks; all ranks call this, with the same number.

        They go with the last tensor over them.
        """
        raise NotImplementedError

    def reserve(self, num_bytes: int) -> None:
        """Have slots of at least ``num_bytes``; all ranks call this together, with the same number."""
        if num_bytes > self._size:
            size = -(-num_bytes // self.unit) * self.unit
            self.close(together=True)  # a heap of fixed size has room for the new slots only after that
            self._parts = [list(whole.split(size)) for whole in self.allocate(SLOTS * size)]
            self._size = size

    def slot(self, rank: int, which: int) -> Tensor:
        """Slot ``which`` of ``rank`` as uint8, on the device of that rank."""
        return self._parts[rank][which]

    def close(self, together: bool) -> None:
        """Release the memory; ``together``: all ranks do so, and none frees what another has open."""
        self._parts, self._size = [], 0


def shared_folder() -> Path:
    """Folder whose files live in memory, or the one for temporary files if there is none."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


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


class SharedFiles(PeerMemory):
    """CPU ranks: files in shared memory, unlinked as soon as all ranks have them open, so that none is left behind.

    The pages go with the last rank that has them mapped.
    """

    unit = mmap.PAGESIZE

    def __init__(self, rank: int, gather: GatherObjects) -> None:
        super().__init__()
        self._rank, self._gather = rank, gather

    def allocate(self, num_bytes: int) -> list[Tensor]:
        """See :meth:`PeerMemory.allocate`."""
        path = shared_folder() / f"weft-{uuid.uuid4().hex}"
        here = map_shared(path, num_bytes, create=True)
        wholes = [
            here if rank == self._rank else map_shared(Path(other), num_bytes, create=False)
            for rank, other in enumerate(self._gather(str(path)))
        ]
        self._gather(None)
        path.unlink(missing_ok=True)
        return wholes


class CudaIpc(PeerMemory):
    """Ranks on GPUs of one host, also several on one GPU: a CUDA allocation of each, opened by the others.

    A handle of torch's is for one reader: it counts readers, and what it is a handle of is freed once they are gone. So
    there is one per peer. Memory that others have open is dropped by all of them before its owner frees it.
    """

    def __init__(self, rank: int, ranks: int, gather: GatherObjects, device: torch.device) -> None:
        super().__init__()
        self._rank, self._ranks, self._gather, self._device = rank, ranks, gather, device

    def allocate(self, num_bytes: int) -> list[Tensor]:
        """See :meth:`PeerMemory.allocate`."""
        from torch.multiprocessing.reductions import reduce_tensor

        here = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        # One handle per peer, and None for this rank, which must not open its own.
        handles = [None if rank == self._rank else reduce_tensor(here) for rank in range(self._ranks)]
        offered = [of_peer[self._rank] for of_peer in self._gather(handles)]
        wholes = [here if handle is None else handle[0](*handle[1]) for handle in offered]
        self._gather(None)  # every rank has everything open
        return wholes

    def close(self, together: bool) -> None:
        """Close what is open of other ranks, then free the memory of this one."""
        if not self._parts:
            return
        torch.cuda.synchronize(self._device)  # nothing reads peers' memory any more
        own_slots = self._parts[self._rank]
        super().close(together)
        if together:
            self._gather(None)
        del own_slots
        torch.cuda.ipc_collect()


# ---- Torch's symmetric memory
#
# Torch has a backend per process, which its first allocation fixes. Nothing here uses a handle's barriers or signals:
# those of NVSHMEM return without waiting in some versions of torch (pytorch/pytorch issue 191858). Ranks wait at
# Weft's own barrier, after their GPU has finished.


def _torch_module() -> Any:
    from torch.distributed import _symmetric_memory  # a run on one rank does without

    return _symmetric_memory


def has_nvshmem() -> bool:
    """Whether this torch was built with NVSHMEM, and finds its library here."""
    return bool(_torch_module().is_nvshmem_available())


class Symmetric(PeerMemory):
    """Ranks on distinct GPUs that torch's symmetric memory connects (NVLink); needs an NCCL process group."""

    def __init__(self, rank: int, ranks: int, device: torch.device, backend: str = "CUDA") -> None:
        super().__init__()
        self._rank, self._ranks, self._device, self.backend = rank, ranks, device, backend
        if backend != "CUDA":
            try:
                _torch_module().set_backend(backend)
            except RuntimeError as error:
                raise InputError(
                    f"peers={backend.lower()!r}: torch does not change to this kind of symmetric memory in this "
                    f"process ({_first_line(error)}); start another process, or leave it out"
                ) from None

    def allocate(self, num_bytes: int) -> list[Tensor]:
        """See :meth:`PeerMemory.allocate`."""
        import torch.distributed as dist

        try:
            here: Tensor = _torch_module().empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            more = "; its heap has NVSHMEM_SYMMETRIC_SIZE bytes" if self.backend == "NVSHMEM" else ""
            raise OutOfMemoryError(
                f"cannot have {show_bytes(num_bytes)} of symmetric memory ({_first_line(error)}){more}; "
                "use more ranks, or fewer members"
            ) from None
        handle = _torch_module().rendezvous(here, dist.group.WORLD) if self._ranks > 1 else None
        ranks = range(self._ranks)
        return [here if r == self._rank else handle.get_buffer(r, (num_bytes,), torch.uint8) for r in ranks]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def check_peers(peers: str, device: torch.device, distinct: bool) -> None:
    """A :class:`SpecError` or :class:`InputError` for a kind of peer memory that there is not, or that cannot be had.

    ``distinct``: no two ranks are on one GPU.
    """
    shown = option("peers", peers)  # as in a shell, or in Python
    RunOptions(peers=peers).check_device(device.type)
    if peers in BACKENDS and not distinct:
        raise SpecError(
            f"{shown} needs a GPU per rank, and here ranks share one; use {option('peers', 'ipc')}, or leave it out"
        )
    if peers == "nvshmem" and not has_nvshmem():
        raise InputError(
            f"{shown}: torch {torch.__version__} has no NVSHMEM here (it needs a build with it and "
            "libnvshmem_host, as in the package nvidia-nvshmem-cu13); use the kind symmetric, or leave it out"
        )


def peer_memory_for(
    rank: int, ranks: int, device: torch.device, distinct: bool, gather: GatherObjects, peers: str = "auto"
) -> PeerMemory:
    """The kind that suits ``device``, or the requested one; ``distinct``: no two ranks are on one GPU."""
    check_peers(peers, device, distinct)
    if device.type != "cuda":
        return SharedFiles(rank, gather)
    if peers == "ipc" or not distinct:
        return CudaIpc(rank, ranks, gather, device)
    return Symmetric(rank, ranks, device, BACKENDS.get(peers, "CUDA"))


class RankLostError(TrainingError):
    """A rank is gone, or did not arrive in time: the run cannot continue."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


POLL_SECONDS = 0.2  # between two checks whether a late rank is alive
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
    """Ranks of one host wait for each other through counters in shared memory.

    A rank that has died is noticed by the ranks that wait for it, so a run ends with an error within seconds instead of
    hanging. ``counters [ranks]`` int64 in shared memory, one per rank; ``pids`` are the processes behind them.

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
        spins, begin, checked = 0, 0.0, 0.0
        while (self._numbers < self._count).any():
            spins += 1
            if spins < SPINS:
                continue
            now = time.monotonic()
            begin = begin or now
            if now - checked > POLL_SECONDS:
                dead, late = self.dead(), self.late()  # in this order: a rank may arrive, and then end
                gone = [rank for rank in dead if rank in late]
                if gone or (late and now - begin > self._timeout):
                    rank = (gone or late)[0]
                    what = "has died" if gone else f"did not arrive within {self._timeout:g} s"
                    raise RankLostError(f"rank {rank} of {len(self._pids)} {what}; the run cannot continue", rank)
                checked = now
            time.sleep(2e-5 if now - begin < 0.01 else 5e-4)

    def late(self) -> list[int]:
        """The ranks that have not arrived."""
        return [rank for rank in range(len(self._pids)) if self._numbers[rank] < self._count]

    def dead(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [rank for rank, pid in enumerate(self._pids) if rank != self._rank and not is_alive(pid)]
