"""Time, memory and traffic of a function on a device: warm up, repeat, take the median and say how it spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch

from weft.ops.csr.adjacency import Adjacency


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, quartiles and extremes of ``repeats`` measurements."""

    ms: float
    low: float
    high: float
    best: float
    worst: float
    repeats: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """The summary of measured milliseconds."""
        low, _, high = quantiles(samples, n=4) if len(samples) > 1 else samples * 3
        return cls(median(samples), low, high, min(samples), max(samples), len(samples))

    def scaled(self, factor: float) -> Timing:
        """Every time multiplied by ``factor`` (one call of a batch of calls)."""
        times = {name: value * factor for name, value in asdict(self).items() if name != "repeats"}
        return Timing(**times, repeats=self.repeats)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, rounded to a tenth of a microsecond."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(fn: Callable[[], Any], device: torch.device, *, warmup: int, repeats: int) -> Timing:
    """Time ``repeats`` calls in a row, with no synchronisation between them."""
    for _ in range(warmup):
        fn()
    synchronize(device)
    return Timing.of(_gpu_samples(fn, repeats) if device.type == "cuda" else _cpu_samples(fn, repeats))


def _gpu_samples(fn: Callable[[], Any], repeats: int) -> list[float]:
    # Events between the calls: the host may run ahead as it does in training, and each interval is what the
    # device's timeline gained by one call.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        fn()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def _cpu_samples(fn: Callable[[], Any], repeats: int) -> list[float]:
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def time_until(
    fn: Callable[[], Any],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    seconds: float,
    least: int = 3,
) -> Timing:
    """As :func:`time_calls`, with fewer repeats (down to ``least``) where they would take over ``seconds``."""
    for _ in range(max(warmup - 1, 0)):
        fn()
    once = time_calls(fn, device, warmup=0, repeats=1).ms
    fitting = int(seconds * 1e3 / max(once, 1e-6))
    return time_calls(fn, device, warmup=0, repeats=max(least, min(repeats, fitting)))


def record_graph(fn: Callable[[], Any], warmup: int = 2) -> tuple[torch.cuda.CUDAGraph, Any]:
    """``fn`` recorded as a CUDA graph, and what it returned (tensors in the graph's memory)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn()
    return graph, result


class Memory:
    """Bytes of device memory: what was there before, and the highest mark since."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._allocated()
        self.restart()

    def restart(self) -> None:
        """Forget the mark; what was there before stays."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_gb(self) -> float | None:
        """The highest mark in GB; None on a CPU, which keeps no such account."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) / 1e9

    def added_gb(self) -> float | None:
        """The highest mark above what was there before, in GB."""
        peak = self.peak_gb()
        return None if peak is None else peak - self._before / 1e9

    def _allocated(self) -> int:
        if self._device.type != "cuda":
            return 0
        return torch.cuda.memory_allocated(self._device)


def copy_bandwidth(device: torch.device, gigabytes: float = 4.0) -> float:
    """TB/s of a large device-to-device copy, bytes read plus bytes written: the ceiling of this machine."""
    elements = int((gigabytes if device.type == "cuda" else 0.02) * 1e9 / 4)
    source = torch.rand(elements, device=device)
    target = torch.empty_like(source)
    timing = time_calls(lambda: target.copy_(source), device, warmup=3, repeats=10)
    return 2 * 4 * elements / timing.ms / 1e9


SHOWN = 10  # kernels


def profile(work: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Run ``work`` (``steps`` steps) under torch's profiler: ``busy`` in [0, 1], the longest kernels in ms per step."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as found:
        work()
        torch.cuda.synchronize()
    spans, by_name = [], {}
    for event in found.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        begin, end = event.time_range.start, event.time_range.end
        spans.append((begin, end))
        by_name[event.name] = by_name.get(event.name, 0.0) + end - begin
    if not spans:
        return {"busy": None, "kernels": {}}
    longest = sorted(by_name.items(), key=lambda pair: -pair[1])[:SHOWN]
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    kernels = {name[:80]: round(amount / steps / 1e3, 4) for name, amount in longest}
    return {"busy": round(covered(spans) / max(whole, 1e-9), 4), "kernels": kernels}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reach), 0.0)
        reach = max(reach, end)
    return total


FLOAT = 4


def compulsory_bytes(adj: Adjacency, num_features: int, factors: int) -> int:
    """Row offsets and column ids, factors, x once, out once."""
    return gathered_bytes(adj, num_features, factors) + (adj.num_cols - adj.num_edges) * num_features * FLOAT


def gathered_bytes(adj: Adjacency, num_features: int, factors: int) -> int:
    """Row offsets and column ids, factors, a row of x per edge, out once."""
    structure = adj.indptr.numel() * adj.indptr.element_size() + adj.num_edges * adj.indices.element_size()
    return structure + factors + (adj.num_edges + adj.num_rows) * num_features * FLOAT
