"""Find how many bytes a run may take, cap the device's memory at a budget, and measure the peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from weft.core.host_memory import free_host_bytes
from weft.core.machine import Machine
from weft.engine.graphs import GraphStore
from weft.engine.memory import give_back_heap, keep_heap, peak_bytes, watch_peak
from weft.planner.grouping.limits import USABLE


def room(device: torch.device, machine: Machine, budget: int | None = None) -> int:
    """Bytes that a group may take on ``device``, everything counted: what is free less a margin, or the budget.

    What this process holds already (CUDA's context, memory that torch keeps at hand) is part of what the group takes.
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
    kept: GraphStore | None = None,
    graphs: Iterable[str] = (),
) -> Iterator[None]:
    """Torch takes no more of a GPU than ``budget`` inside, CUDA's context included; as much as before outside.

    Every allocation counts, small ones too: torch compares what it has reserved with the cap before it asks the driver.
    Graphs that ``kept`` holds between runs come on top, except those called ``graphs``, which this run trains on. A CPU
    has no such cap: there the budget is kept by planning, and in a worker by a limit on its process.
    """
    if budget is None or machine is None or device.type != "cuda":
        yield
        return
    before, own = memory_fraction(device), max(budget - machine.context_bytes, 0)
    total = torch.cuda.get_device_properties(device).total_memory

    def follow(others: int) -> None:
        set_memory_fraction(min((own + others) / total, before), device)

    follow(0)
    try:
        with nullcontext() if kept is None else kept.following(graphs, follow):
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
    """A GPU's, which torch's functions ask for; of plain ``cuda`` the current one's."""
    return torch.cuda.current_device() if device.index is None else device.index


def watch_memory(device: torch.device) -> None:
    """Forget the peaks of what ran before; on a CPU, also give back what it has freed, and keep what is freed next."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        give_back_heap()
        keep_heap()
        watch_peak()


def memory_taken(device: torch.device) -> dict[str, int]:
    """The peaks since :func:`watch_memory`: of a GPU by torch's account, of a CPU the whole process."""
    if device.type != "cuda":
        peak = peak_bytes()
        return {} if peak is None else {"process_bytes": peak}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }
