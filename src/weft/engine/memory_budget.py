"""Find how many bytes a run may take, cap the device's memory at a budget, and measure the peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from weft.core.host_memory import free_host_bytes
from weft.core.machine import Machine
from weft.engine.graphs import GraphStore
from weft.engine.memory import give_back_heap, keep_heap, status_bytes, watch_peak
from weft.planner.grouping.limits import USABLE


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
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch has it since 2.6
    return float(read(_number(device))) if device.type == "cuda" and read is not None else 1.0


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
