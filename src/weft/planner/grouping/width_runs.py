"""Decide which widths share a stack, padded with zeros: if the zeros cost less than a separate step.

Tasks that differ in width alone can share one stack, or be several. A stack costs its launches once; every
member of it costs what the widest costs. The best way to cut the sorted widths into neighbouring runs is
found exactly, by dynamic programming over the few distinct widths of a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


def cut_widths(counts: Mapping[int, int], cost: Callable[[int], float], overhead: float) -> list[list[int]]:
    """The distinct widths of ``counts`` (width -> tasks of it) in runs that share a stack, narrow to wide.

    ``cost(width)`` is what one task costs at that width, ``overhead`` what one more stack costs.
    """
    order = sorted(counts)
    best: list[tuple[float, int]] = [(0.0, 0)]  # for the first i widths: their cost, and where the last run begins
    for end in range(1, len(order) + 1):
        widest = cost(order[end - 1])
        options = []
        for begin in range(end):
            tasks = sum(counts[width] for width in order[begin:end])
            options.append((best[begin][0] + tasks * widest + overhead, begin))
        best.append(min(options))
    runs, end = [], len(order)
    while end:
        begin = best[end][1]
        runs.append(order[begin:end])
        end = begin
    return runs[::-1]


def waste(counts: Mapping[int, int], cost: Callable[[int], float]) -> float:
    """The share of the work of a padded run that is spent on zeros."""
    padded = sum(counts.values()) * cost(max(counts))
    useful = sum(tasks * cost(width) for width, tasks in counts.items())
    return 1.0 - useful / padded if padded else 0.0
