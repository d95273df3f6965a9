"""Read what this process takes of the host's memory: now, and at its peak since a moment."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.core.units import show_bytes
from weft.graph.graph import Graph
from weft.graph.labels import SPLITS
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency
from weft.runtime.group import GroupRun
from weft.runtime.step.stack import Stack
from weft.sched.two_ended_pool import ALIGNMENT, HIGH, LOW, PoolRange, TwoEndedPool

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # of the resident set, as Linux takes it
KERNELS = 125 << 20  # of numba with its kernels, which the first step on a CPU loads
PROCESS = 260 << 20  # of Python with torch and Weft, where the system does not say
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the names that glibc's mallopt has for them
TRIM_BYTES, MMAP_BYTES = (1 << 31) - 1, 32 << 20  # the largest numbers that it takes
OWN_WORDS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def resident_bytes() -> int | None:
    """Bytes of this process in memory now; None where the system does not say."""
    return _status("VmRSS")


def base_bytes() -> int:
    """What a training on a CPU finds taken when it begins: Python, torch, Weft, and kernels that are yet to load."""
    now = resident_bytes() or PROCESS
    return now + (0 if "numba" in sys.modules else KERNELS)


@cache
def keep_heap() -> None:
    """From now on glibc keeps what is freed for the next step, instead of giving pages back that it then asks for.

    An epoch of four GINs of PyG on the pubmed shape took 338 ms instead of 499. Where the user has said how
    glibc should do it, nothing happens; nor elsewhere. It holds for the process: glibc does not say what it did before.
    """
    if any(name in os.environ for name in OWN_WORDS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, TRIM_BYTES)
        mallopt(MMAP_THRESHOLD, MMAP_BYTES)


def give_back_heap() -> None:
    """Give memory that was freed back to the system, as glibc does not by itself; elsewhere nothing happens."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def watch_peak() -> bool:
    """Forget the peak so far; whether that was possible."""
    try:
        CLEAR.write_text(RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def peak_bytes() -> int | None:
    """The most since :func:`watch_peak`; None where the system does not say."""
    return _status("VmHWM")


def _status(name: str) -> int | None:
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, StopIteration, IndexError):
        return None


# ---- DevicePool: tensors carved out of one buffer of a device, which is allocated once.
#
# Between groups nothing is allocated or freed there, so nothing fragments: clearing an owner gives its bytes back to
# the
# buffer. Who clears an owner must hold no tensor of it any more.

POISON = 0xFF  # NaN in every type of float


class DevicePool:
    """``capacity`` bytes of ``device``, the first ``reserved`` of them given to nobody.

    ``poison``: fill what is cleared with NaN, so that a tensor that outlives its owner is found out.
    """

    def __init__(self, device: torch.device, capacity: int, reserved: int = 0, poison: bool = False) -> None:
        self._whole = torch.empty(capacity + ALIGNMENT, dtype=torch.uint8, device=device)
        skipped = -self._whole.data_ptr() % ALIGNMENT
        self._bytes = self._whole[skipped : skipped + capacity]
        self._plan, self._poison = TwoEndedPool(capacity, reserved), poison
        self._tensors: dict[str, list[tuple[PoolRange, Tensor]]] = {}
        self._lock = threading.RLock()  # a worker's second thread fetches into it

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._whole.device

    @property
    def capacity(self) -> int:
        """Its bytes."""
        return self._plan.capacity

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return self._plan.free

    @property
    def storage(self) -> int:
        """The address of the one storage that all of its tensors share."""
        return self._whole.untyped_storage().data_ptr()

    def holes(self) -> list[tuple[int, int]]:
        """Its free parts."""
        return self._plan.holes()

    def owners(self) -> list[str]:
        """Everybody who has bytes of it."""
        return list(self._tensors)

    def held(self, owner: str) -> int:
        """Bytes of ``owner``."""
        return self._plan.held(owner)

    def carve(self, owner: str, shape: Sequence[int], dtype: torch.dtype, end: str = LOW) -> Tensor | None:
        """An uninitialised tensor at one end of the buffer; None if there is no room for it."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            place = self._plan.put(owner, size, end)
            if place is None:
                return None
            tensor = self._at(place.offset, shape, dtype)
            self._tensors.setdefault(owner, []).append((place, tensor))
            return tensor

    def _at(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Not a view, whose changes autograd would take for those of every other view of the buffer."""
        first = (self._bytes.storage_offset() + offset) // dtype.itemsize
        strides = torch.empty(tuple(shape), device="meta").stride()
        made = torch.empty(0, dtype=dtype, device=self.device)
        return made.set_(self._whole.untyped_storage(), first, tuple(shape), strides)

    def copy_in(self, owner: str, tensors: Mapping[str, Tensor], end: str = LOW) -> dict[str, Tensor] | None:
        """Copies of ``tensors`` on the current stream, all of them or none (None); from pinned memory they overlap."""
        with self._lock:
            places = {name: self.carve(owner, one.shape, one.dtype, end) for name, one in tensors.items()}
            found = {name: place for name, place in places.items() if place is not None}
            if len(found) < len(tensors):
                self.clear(owner)
                return None
        for name, place in found.items():
            place.copy_(tensors[name], non_blocking=True)
        return found

    def clear(self, owner: str) -> int:
        """Give back all bytes of ``owner``; how many."""
        with self._lock:
            for place, _ in self._tensors.pop(owner, []) if self._poison else ():
                self._bytes[place.offset : place.stop].fill_(POISON)
            self._tensors.pop(owner, None)
            return self._plan.clear(owner)

    def pack(self, owner: str) -> None:
        """Move what ``owner`` has as near to its end as it goes; its tensors are the same objects, elsewhere.

        For what nobody works on yet: weights that were fetched ahead, once the group before them has gone.
        """
        with self._lock:
            kept = [tensor for _, tensor in self._tensors.get(owner, [])]
            old = {place.offset: tensor for place, tensor in self._tensors.get(owner, [])}
            for move in self._plan.pack(owner):
                moved = self._bytes[move.source : move.source + move.size].clone()  # the places may overlap
                self._bytes[move.target : move.target + move.size].copy_(moved)
                tensor = old[move.source]
                tensor.set_(self._at(move.target, tensor.shape, tensor.dtype))
            by_address = {self._bytes.data_ptr() + each.offset: each for each in self._plan.ranges}
            self._tensors[owner] = [(by_address[tensor.data_ptr()], tensor) for tensor in kept]


# ---- The state of a group (weights, moments, best weights, history) in a device's pool, from its high end.

GROUP = "group"


def move_in(group: GroupRun, pool: DevicePool) -> str:
    """Move the state of every stack into ``pool``; what to tell if some of it did not fit, and stays where it is."""
    left = [stack for stack in group.stacks if not _move(stack, pool)]
    if not left:
        return ""
    size = sum(tensor.nbytes for stack in left for tensor in stack.state.tensors().values())
    return f"{show_bytes(size)} of weights and optimizer state do not fit into the worker's pool, and lie beside it"


def _move(stack: Stack, pool: DevicePool) -> bool:
    tensors = stack.state.tensors()
    before = pool.free
    if sum(tensor.nbytes for tensor in tensors.values()) > before:
        return False
    owner = f"{GROUP}/{id(stack)}"
    copied = pool.copy_in(owner, tensors, HIGH)
    if copied is None:
        return False
    stack.use_state(stack.state.of(copied))
    return True


def move_out(pool: DevicePool) -> None:
    """Give back what the groups had: nothing of them is used any more."""
    for owner in pool.owners():
        if owner.startswith(f"{GROUP}/"):
            pool.clear(owner)


# ---- A graph whose arrays lie in a device's pool.


def into_pool(graph: Graph, pool: DevicePool, owner: str) -> Graph | None:
    """A copy of ``graph`` in ``pool``; None if it does not fit. What is derived from it is made beside the pool."""
    copied = pool.copy_in(owner, arrays_of(graph))
    if copied is None:
        return None
    fields = {name: copied[name] for name in ("y", *SPLITS) if name in copied}
    x = copied.get("x")
    fields["x"] = SparseFeatures(_matrix(graph.x.matrix, "x.", copied)) if isinstance(graph.x, SparseFeatures) else x
    adj = _matrix(graph.adj, "adj.", copied)
    if graph.relation is not None:
        adj = adj.related(copied["relation"], graph.num_relations)
    made = graph._changed(adj=adj, relation=copied.get("relation"), **fields)
    made._stats = graph._stats
    return made


def arrays_of(graph: Graph) -> dict[str, Tensor]:
    """The arrays of a graph by name; nothing derived."""
    found = {name: getattr(graph, name) for name in ("y", "relation", *SPLITS)}
    found |= _arrays(graph.adj, "adj.")
    found |= _arrays(graph.x.matrix, "x.") if isinstance(graph.x, SparseFeatures) else {"x": graph.x}
    return {name: array for name, array in found.items() if array is not None}


def _arrays(matrix: Adjacency, prefix: str) -> dict[str, Tensor | None]:
    return {f"{prefix}{name}": getattr(matrix, name) for name in ("indptr", "indices", "weight")}


def _matrix(matrix: Adjacency, prefix: str, arrays: dict[str, Tensor]) -> Adjacency:
    parts = arrays[f"{prefix}indptr"], arrays[f"{prefix}indices"], matrix.num_cols
    return Adjacency(*parts, weight=arrays.get(f"{prefix}weight"), symmetric=matrix.symmetric)
