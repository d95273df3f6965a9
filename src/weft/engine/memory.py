"""Memory: what this process holds, a pool of the device for graphs and states, and the budget of a run."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.core.host_memory import free_host_bytes
from weft.core.machine import Machine
from weft.core.units import show_bytes
from weft.graph.graph import Graph
from weft.graph.labels import SPLITS
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency
from weft.planner.grouping.limits import USABLE
from weft.runtime.group import GroupRun
from weft.sched.two_ended_pool import ALIGNMENT, HIGH, LOW, Move, PoolRange, TwoEndedPool

if TYPE_CHECKING:
    from weft.engine.graphs import GraphStore

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # of the resident set, as Linux takes it
KERNELS = 125 << 20  # of numba with its kernels, which the first step on a CPU loads
PROCESS = 260 << 20  # of Python with torch and Weft, where the system does not say
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the names that glibc's mallopt has for them
TRIM_BYTES, MMAP_BYTES = (1 << 31) - 1, 32 << 20  # the largest numbers that it takes
OWN_WORDS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


# ---- The process


def base_bytes() -> int:
    """Bytes before a training on a CPU begins: Python, torch, Weft, and kernels that are yet to load."""
    now = status_bytes("VmRSS") or PROCESS
    return now + (0 if "numba" in sys.modules else KERNELS)


@cache
def keep_heap() -> None:
    """Let glibc keep freed memory for the next step from now on, instead of returning pages to the system.

    An epoch of four GINs of PyG on the pubmed shape took 338 ms instead of 499. Nothing happens if the user has set
    glibc's options, or without glibc. It holds for the process: glibc does not report the former setting.
    """
    if any(name in os.environ for name in OWN_WORDS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, TRIM_BYTES)
        mallopt(MMAP_THRESHOLD, MMAP_BYTES)


def give_back_heap() -> None:
    """Return freed memory to the system, which glibc does not do by itself; without glibc nothing happens."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def watch_peak() -> bool:
    """Forget the peak so far; True if that was possible."""
    try:
        CLEAR.write_text(RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def status_bytes(name: str) -> int | None:
    """Bytes of this process: ``"VmRSS"`` now, ``"VmHWM"`` at most since :func:`watch_peak`; None if not reported."""
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, StopIteration, IndexError):
        return None


# ---- DevicePool: tensors carved out of one buffer of a device, which is allocated once.
#
# Between groups nothing is allocated or freed there, so nothing fragments: clearing an owner returns its bytes to the
# buffer. The caller that clears an owner must hold no tensor of it any more.


class DevicePool(TwoEndedPool):
    """``capacity`` bytes of ``device``; ``storage``: the address of the one storage that all of its tensors share."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        super().__init__(capacity)
        self._whole = torch.empty(capacity + ALIGNMENT, dtype=torch.uint8, device=device)
        skipped = -self._whole.data_ptr() % ALIGNMENT
        self._bytes = self._whole[skipped : skipped + capacity]
        self.device, self.storage = self._whole.device, self._whole.untyped_storage().data_ptr()
        self._tensors: dict[str, list[tuple[PoolRange, Tensor]]] = {}
        self._lock = threading.RLock()  # a worker's second thread fetches into it

    def owners(self) -> list[str]:
        """All owners of bytes of it."""
        return list(self._tensors)

    def carve(self, owner: str, shape: Sequence[int], dtype: torch.dtype, end: str = LOW) -> Tensor | None:
        """An uninitialised tensor at one end of the buffer; None if there is no room for it."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            block = self.put(owner, size, end)
            if block is None:
                return None
            tensor = self._at(block.offset, shape, dtype)
            self._tensors.setdefault(owner, []).append((block, tensor))
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
            carved = {name: self.carve(owner, tensor.shape, tensor.dtype, end) for name, tensor in tensors.items()}
            copies = {name: copy for name, copy in carved.items() if copy is not None}
            if len(copies) < len(tensors):
                self.clear(owner)
                return None
        for name, copy in copies.items():
            copy.copy_(tensors[name], non_blocking=True)
        return copies

    def clear(self, owner: str) -> int:
        """Free all bytes of ``owner``; returns how many."""
        with self._lock:
            self._tensors.pop(owner, None)
            return super().clear(owner)

    def pack(self, owner: str) -> list[Move]:
        """Move the tensors of ``owner`` as near to its end as they go; they stay the same objects.

        For what is not used yet: weights that were fetched ahead, once the group before them has gone.
        """
        with self._lock:
            tensors = [tensor for _, tensor in self._tensors.get(owner, [])]
            old = {block.offset: tensor for block, tensor in self._tensors.get(owner, [])}
            moves = super().pack(owner)
            for move in moves:
                moved = self._bytes[move.source : move.source + move.size].clone()  # the places may overlap
                self._bytes[move.target : move.target + move.size].copy_(moved)
                tensor = old[move.source]
                tensor.set_(self._at(move.target, tensor.shape, tensor.dtype))
            by_address = {self._bytes.data_ptr() + each.offset: each for each in self.ranges}
            self._tensors[owner] = [(by_address[tensor.data_ptr()], tensor) for tensor in tensors]
            return moves


# ---- The state of a group (weights, moments, best weights, history) in a device's pool, from its high end

GROUP = "group"


def move_in(group: GroupRun, pool: DevicePool) -> str:
    """Move the state of every stack into ``pool``; returns a note if some of it did not fit, and stays where it is."""
    outside = 0
    for stack in group.stacks:
        tensors = stack.state.tensors()
        size = sum(tensor.nbytes for tensor in tensors.values())
        copied = pool.copy_in(f"{GROUP}/{id(stack)}", tensors, HIGH) if size <= pool.free else None
        if copied is None:
            outside += size
        else:
            stack.use_state(stack.state.of(copied))
    if not outside:
        return ""
    return f"{show_bytes(outside)} of weights and optimizer state do not fit into the worker's pool, and lie outside it"


def move_out(pool: DevicePool) -> None:
    """Free the states of all groups: nothing of them is used any more."""
    for owner in pool.owners():
        if owner.startswith(f"{GROUP}/"):
            pool.clear(owner)


# ---- A graph whose arrays lie in a device's pool


def into_pool(graph: Graph, pool: DevicePool, owner: str) -> Graph | None:
    """A copy of ``graph`` in ``pool``; None if it does not fit. What is derived from it is made outside the pool."""
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
    arrays = {name: getattr(graph, name) for name in ("y", "relation", *SPLITS)}
    matrices = {"adj.": graph.adj}
    if isinstance(graph.x, SparseFeatures):
        matrices["x."] = graph.x.matrix
    else:
        arrays["x"] = graph.x
    for prefix, matrix in matrices.items():
        arrays |= {f"{prefix}{name}": getattr(matrix, name) for name in ("indptr", "indices", "weight")}
    return {name: array for name, array in arrays.items() if array is not None}


def _matrix(matrix: Adjacency, prefix: str, arrays: dict[str, Tensor]) -> Adjacency:
    parts = arrays[f"{prefix}indptr"], arrays[f"{prefix}indices"], matrix.num_cols
    return Adjacency(*parts, weight=arrays.get(f"{prefix}weight"), symmetric=matrix.symmetric)


# ---- The budget of a run: how many bytes it may take, the cap at it, and the measured peak


def room(device: torch.device, machine: Machine, budget: int | None = None) -> int:
    """Bytes that a group may take on ``device``, everything counted: what is free less a margin, or the budget.

    What this process holds already (CUDA's context, memory that torch has reserved) is part of what the group takes.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    else:
        free = free_host_bytes()
    there = int(USABLE * free) + machine.context_bytes
    return there if budget is None else min(budget, there)


@contextmanager
def memory_cap(
    device: torch.device,
    machine: Machine | None,
    budget: int | None,
    store: GraphStore | None = None,
    graphs: Iterable[str] = (),
) -> Iterator[None]:
    """Cap what torch takes of a GPU at ``budget``, CUDA's context included.

    Every allocation counts, small ones too: torch compares what it has reserved with the cap before it calls the
    driver. Graphs in ``store`` come on top, except those called ``graphs``, which this run trains on. A CPU has no such
    cap: there planning keeps to the budget, and in a worker a limit on its process.
    """
    if budget is None or machine is None or device.type != "cuda":
        yield
        return
    before, tensors = memory_fraction(device), max(budget - machine.context_bytes, 0)
    total = torch.cuda.get_device_properties(device).total_memory

    def follow(stored: int) -> None:
        set_memory_fraction(min((tensors + stored) / total, before), device)

    follow(0)
    try:
        with nullcontext() if store is None else store.following(graphs, follow):
            yield
    finally:
        set_memory_fraction(before, device)


def memory_fraction(device: torch.device) -> float:
    """The share of a GPU's memory that torch may take in this process; 1 on a CPU, which has no such cap."""
    return float(torch.cuda.get_per_process_memory_fraction(_number(device))) if device.type == "cuda" else 1.0


def set_memory_fraction(share: float, device: torch.device) -> None:
    """Let torch take so much of a GPU's memory in this process."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, _number(device))


def _number(device: torch.device) -> int:
    """The number of a GPU, which torch's functions require; of plain ``cuda`` that of the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


def watch_memory(device: torch.device) -> None:
    """Forget the peaks of earlier runs; on a CPU, return freed memory to the system and keep what is freed next."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        give_back_heap()
        keep_heap()
        watch_peak()


def memory_taken(device: torch.device) -> dict[str, int]:
    """The peaks since :func:`watch_memory`: of a GPU by torch's account, of a CPU the whole process."""
    if device.type != "cuda":
        peak = status_bytes("VmHWM")
        return {} if peak is None else {"process_bytes": peak}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }
