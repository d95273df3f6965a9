"""The shortest schedule of a few equal batches by brute force: every split over two routes, every order of phases.

Appending phases one by one, each as early as the constraints allow, reaches every schedule in which nothing can begin
earlier, and so an optimal one.
"""

from __future__ import annotations

import math
from functools import cache


def optimum(batches: int, host: float, dma: float, device: float, train: float, cbs: int, gbs: int) -> float:
    """The least makespan of ``batches`` under MorphGL's Equations 2 to 4, with one worker, in any order of training."""
    return min(_one_split(batches - own, own, host, dma, device, train, cbs, gbs) for own in range(batches + 1))


def _one_split(
    by_host: int, by_device: int, host: float, dma: float, device: float, train: float, cbs: int, gbs: int
) -> float:
    best = math.inf
    total = by_host + by_device

    def go(ends: tuple[float, ...], starts: tuple[float, ...], ready: tuple[float, ...], trained: tuple[float, ...],
           prepared: int, free: tuple[float, float, float]) -> None:  # fmt: skip
        nonlocal best
        cpu, pcie, gpu = free
        if len(trained) == total:
            best = min(best, gpu)
            return
        if max(gpu + (total - len(trained)) * train, pcie) >= best:
            return
        if len(ends) < by_host and (len(ends) < cbs or len(starts) > len(ends) - cbs):
            begin = cpu if len(ends) < cbs else max(cpu, starts[len(ends) - cbs] - host)
            go((*ends, begin + host), starts, ready, trained, prepared, (begin + host, pcie, gpu))
        arrived = len(starts) + prepared
        has_room, since = _room(arrived, trained, train, gbs)
        if len(starts) < len(ends) and has_room:
            begin = max(pcie, ends[len(starts)], since - dma)
            go(ends, (*starts, begin), (*ready, begin + dma), trained, prepared, (cpu, begin + dma, gpu))
        if prepared < by_device and has_room:
            begin = max(pcie, gpu, since - device)
            end = begin + device
            go(ends, starts, (*ready, end), trained, prepared + 1, (cpu, end, end))
        if len(trained) < len(ready):
            first = sorted(ready)[len(trained)]
            begin = max(gpu, first)
            go(ends, starts, ready, (*trained, begin), prepared, (cpu, pcie, begin + train))

    go((), (), (), (), 0, (0.0, 0.0, 0.0))
    return best


def _room(arrived: int, trained: tuple[float, ...], train: float, gbs: int) -> tuple[bool, float]:
    """Whether one more batch may arrive on the device, and since when."""
    if arrived < gbs:
        return True, 0.0
    needed = arrived - gbs  # the training that makes room
    return (True, trained[needed]) if needed < len(trained) else (False, 0.0)


@cache
def cached_optimum(*given: float) -> float:
    """:func:`optimum` of rounded durations, since tests repeat them."""
    batches, host, dma, device, train, cbs, gbs = given
    return optimum(int(batches), host, dma, device, train, int(cbs), int(gbs))
