"""Memory: what this process holds, and the budget of a run."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weft.core.host_memory import free_host_bytes
from weft.core.machine import Machine
from weft.planner.grouping.limits import USABLE

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
    driver. In a worker, which has a ``store``, the budget is for what the run adds: what the process holds before, also
    of the ``graphs`` that the run trains on, comes on top (:meth:`GraphStore.following`). A CPU has no such cap: there
    planning keeps to the budget, and in a worker a limit on its process.
    """
    if budget is None or machine is None or device.type != "cuda":
        yield
        return
    before, tensors = memory_fraction(device), max(budget - machine.context_bytes, 0)
    total = torch.cuda.get_device_properties(device).total_memory

    def follow(not_charged: int) -> None:
        set_memory_fraction(min((tensors + not_charged) / total, before), device)

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
