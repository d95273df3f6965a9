"""How busy a GPU is: the share of the time in which any kernel runs, and which kernels take it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

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
