"""Measure this machine: rates of its CPUs and its GPU, their memory, and the bandwidth between them and from the disk.

Gathers are measured with Weft's own SpMM on a random graph of equal degrees, from memory and from the cache, since
that is the kernel whose time they predict. Every figure is the first quartile of repeated calls after a warm one:
what the machine does when nothing else disturbs it. Nothing takes longer than about a second, on a CPU included. On a
machine with a GPU both are measured in one run: what is best done where depends on both.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft import ops
from weft.core.gpus import process_bytes
from weft.core.host_memory import cpu_count, host_bytes
from weft.core.machine import Device, Host, Link, Machine, Rates
from weft.core.startup import no_collections
from weft.engine.machine import MIB, cpu_cache_bytes, device_name, machine_of
from weft.ops.csr.adjacency import Adjacency
from weft.runtime.device.cuda_graph import no_capture, streams_of
from weft.runtime.device.process import cpu_threads

ROW_BYTES = (64, 256, 1024)
DEGREE = 16
REPLAYS = 5  # of a call in one captured graph
DISK_BYTES, BUS_BYTES, PAGE = 64 * MIB, 128 * MIB, 4096


@dataclass(frozen=True)
class Sizes:
    """How large the trials are: several caches for what should come from memory, a fraction of it for the rest."""

    copy: int
    table: int
    cached: int
    matmul: tuple[int, int]
    seconds: float


def probe(device: torch.device, sizes: Sizes | None = None) -> Machine:
    """This machine with ``device`` to train on, its host and the links between them; takes some seconds.

    ``sizes``: of the trials on the host; None: by its cache and memory.
    """
    cpu, cache, memory = torch.device("cpu"), cpu_cache_bytes(), host_bytes()
    table = min(max(4 * cache, 128 * MIB), memory // 16)
    sizes = sizes or Sizes(copy=table, table=table, cached=cache // 4, matmul=(4096, 256), seconds=0.15)
    host = Host(
        memory_bytes=memory,
        l2_bytes=cache,
        **_rates(cpu, sizes),
        cores=cpu_count(),
        one_thread=_one_thread_share(sizes),
        sources={"all": f"weft probe, {device_name(cpu)}, torch {torch.__version__}"},
    )
    links: tuple[Link, ...] = ()
    try:  # the disk of the current folder, if it can be written to
        rate, latency = disk_rate(Path.cwd())
        links = (Link("disk", "disk", "host", rate, latency, "weft probe, a file in the current folder"),)
    except OSError:
        pass
    if device.type != "cuda":
        return Machine(machine_of(device), host, (), links, measured=True)
    gpu, bus = _probe_gpu(device)
    return Machine(machine_of(device), host, (gpu,), (*bus, *links), measured=True)


def _probe_gpu(device: torch.device) -> tuple[Device, list[Link]]:
    """The GPU and both directions of its bus."""
    properties = torch.cuda.get_device_properties(device)
    l2 = int(getattr(properties, "L2_cache_size", 0)) or 8 * MIB
    by = f"weft probe, {properties.name}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    with torch.cuda.device(device):
        table = min(max(16 * l2, 1 << 30), properties.total_memory // 8)
        rates = _rates(device, Sizes(table, table, l2 // 3, (65536, 512), 0.3))
        launches = {"launch_seconds": launch_seconds(device), "replay_seconds": replay_seconds(device)}
        transfers, latencies = bus_seconds(device, BUS_BYTES), bus_seconds(device, 8)
        context = context_bytes(device)
    gpu = Device(
        name=properties.name,
        memory_bytes=properties.total_memory,
        context_bytes=context,
        workspace_bytes=int((32 if properties.major >= 9 else 8.125) * MIB),
        l2_bytes=l2,
        sms=properties.multi_processor_count,
        sources={
            "all": by,
            "workspace_bytes": "cuBLAS workspace as PyTorch sets it: 32 MiB from Hopper on, 8.125 MiB before",
        },
        **rates,
        **launches,
    )
    ends = (("host", "gpu:0"), ("gpu:0", "host"))
    links = [
        Link("pcie", origin, target, BUS_BYTES / seconds, latency, by)
        for (origin, target), seconds, latency in zip(ends, transfers, latencies, strict=True)
    ]
    return gpu, links


def _rates(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """The rates that a host and a GPU have in common."""
    tall, wide = sizes.matmul
    flops = 2.0 * tall * wide * wide
    rates = {}
    before = torch.get_float32_matmul_precision()
    try:
        for precision, dtype in (("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)):
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
            a, b = (torch.ones(rows, wide, device=device, dtype=dtype) for rows in (tall, wide))
            out = torch.empty(tall, wide, device=device, dtype=dtype)
            product = partial(torch.mm, a, b, out=out)
            rates[precision] = flops / device_seconds(product, device, sizes.seconds)
    finally:
        torch.set_float32_matmul_precision(before)
    return {
        "copy_bandwidth": copy_bandwidth(device, sizes),
        "gather": gather_rates(device, sizes.table, sizes.seconds),
        "l2_gather": gather_rates(device, sizes.cached, sizes.seconds),
        "flops": rates,
        "op_seconds": op_seconds(device),
        "custom_op_seconds": op_seconds(device, custom=True),
    }


# ---- The clock


def seconds_of(call: Callable[[], Any], device: torch.device, budget: float = 0.2) -> float:
    """First quartile of the seconds of ``call`` on ``device``, repeated for about ``budget`` seconds."""
    call()
    once = _timed(call, device)
    repeats = int(min(max(budget / max(once, 1e-7), 3), 200))
    return sorted(_timed(call, device) for _ in range(repeats))[repeats // 4]


def device_seconds(call: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Seconds of the device alone: on a GPU ``call`` is captured and replayed, so that no launch is waited for."""
    if device.type != "cuda":
        return seconds_of(call, device, budget)
    return seconds_of(_recorded(call, device, REPLAYS).replay, device, budget) / REPLAYS


def _recorded(call: Callable[[], Any], device: torch.device, times: int) -> torch.cuda.CUDAGraph:
    """``call``, ``times`` in a row, as a CUDA graph."""
    side = streams_of(device).recording
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):  # kernels are compiled and libraries set up outside of the capture
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with no_capture(), no_collections(), torch.cuda.graph(graph, stream=side):
        for _ in range(times):
            call()
    return graph


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


# ---- Rates


def copy_bandwidth(device: torch.device, sizes: Sizes) -> float:
    """Bytes read and written a second by one long copy."""
    source = torch.empty(sizes.copy, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    return 2 * sizes.copy / seconds_of(lambda: target.copy_(source), device, sizes.seconds)


def gather_rates(device: torch.device, table_bytes: int, budget: float) -> Rates:
    """Bytes of rows per second that SpMM fetches from a table of ``table_bytes``, by the width of a row."""
    return tuple((width, _gather_rate(device, table_bytes, width, budget)) for width in ROW_BYTES)


def _gather_rate(device: torch.device, table_bytes: int, width: int, budget: float) -> float:
    rows = max(table_bytes // width, 256)
    # A table in memory has many rows; a sixteenth of them as destinations still reads each once on average.
    readers = max(rows // DEGREE, 256) if table_bytes > 64 * MIB else rows
    adj = _regular_graph(readers, rows, device)
    x = torch.ones(rows, width // 4, device=device)
    with torch.no_grad():
        seconds = device_seconds(lambda: ops.spmm(adj, x), device, budget)
    return readers * DEGREE * width / seconds


def _regular_graph(rows: int, cols: int, device: torch.device) -> Adjacency:
    """Every row reads DEGREE random columns."""
    random = torch.Generator(device=device).manual_seed(0)
    indices = torch.randint(0, cols, (rows, DEGREE), generator=random, device=device, dtype=torch.int32)
    indptr = torch.arange(0, rows * DEGREE + 1, DEGREE, dtype=torch.int32, device=device)
    return Adjacency(indptr, indices.sort(1).values.flatten(), cols)


def _one_thread_share(sizes: Sizes) -> float:
    """What one thread reaches of what all reach, in the gather that matters most."""
    if torch.get_num_threads() == 1:
        return 1.0
    cpu = torch.device("cpu")
    together = _gather_rate(cpu, sizes.cached, 256, sizes.seconds)
    with cpu_threads(1):
        alone = _gather_rate(cpu, sizes.cached, 256, sizes.seconds)
    return min(alone / together, 1.0)


def bus_seconds(device: torch.device, size: int) -> tuple[float, float]:
    """Seconds of a copy of ``size`` bytes from pinned host memory to the device, and back."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    to_device = seconds_of(lambda: there.copy_(host, non_blocking=True), device)
    return to_device, seconds_of(lambda: host.copy_(there, non_blocking=True), device)


def disk_rate(folder: Path, size: int = DISK_BYTES) -> tuple[float, float]:
    """Bytes per second of a file in ``folder`` read from its beginning, and seconds until a single page is there.

    The file is written first and dropped from the system's cache where the system allows that; a disk in memory, or one
    behind a cache of its own, is as fast as it is.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(os.urandom(MIB) * (size // MIB))
        file.flush()
        os.fsync(file.fileno())
        seconds = []
        for offsets, count in (([size // 2], PAGE), (range(0, size, MIB), MIB)):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            for offset in offsets:
                os.pread(file.fileno(), count, offset)
            seconds.append(time.perf_counter() - begin)
    latency, whole = seconds
    return size / whole, latency


# ---- Fixed costs


def launch_seconds(device: torch.device, count: int = 500) -> float:
    """Seconds between kernels that Python launches one after another."""
    x = torch.zeros(32, device=device)

    def chain() -> None:
        for _ in range(count):
            x.add_(1.0)

    return seconds_of(chain, device) / count


def replay_seconds(device: torch.device, count: int = 100) -> float:
    """Seconds of a kernel of a captured graph that has hardly anything to do and waits for the one before.

    Taken from kernels of three kinds as a step on a small graph has them: SpMM, a product, an element-wise one.
    """
    adj = _regular_graph(1024, 1024, device)
    x, w = torch.ones(1024, 16, device=device), torch.zeros(16, 16, device=device)

    def chain() -> None:
        y = x
        for _ in range(count):
            y = torch.relu(torch.mm(ops.spmm(adj, y), w))

    with torch.no_grad():
        return seconds_of(_recorded(chain, device, 1).replay, device) / (3 * count)


def op_seconds(device: torch.device, custom: bool = False) -> float:
    """Seconds of the host for an operator under autograd, its backward counted as another.

    ``custom``: an operator of Weft, SpMM over a graph of hardly anything, instead of one of torch.
    """
    count, size = (10, 16) if custom else (50, 8)
    adj = _regular_graph(size, size, device)
    x = torch.zeros(size, size, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(count):
            y = ops.spmm(adj, y) if custom else y * 1.5
        torch.autograd.grad(y, x, torch.ones_like(y))

    return seconds_of(chain, device) / (2 * count)


# ---- Memory


def context_bytes(device: torch.device) -> int:
    """Bytes of the device that this process holds beyond its tensors: the CUDA context and loaded kernels.

    The driver counts it per process; if it does not, whatever else runs there is counted as well.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(device)
    held = process_bytes(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    if held is None:
        free, total = torch.cuda.mem_get_info(device)
        held = total - free
    return max(held - reserved, 0)
