"""Generate power-law degree sequences with an exact sum.

The node of rank r has degree ``max_degree * (1 + r / r0) ^ (-1 / (exponent - 1))``, at least ``low``: its
tail falls as ``degree ^ -exponent``. ``r0`` is solved for so that the degrees add up to the number of edges.
Solved as a histogram of a few thousand bins on the host, so that every device gets the same integers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.generate.counter import spread_counts

BISECTIONS = 80


def power_law(
    num_nodes: int,
    total: int,
    *,
    exponent: float,
    max_degree: int,
    seed: int,
    stream: int,
    device: torch.device | str,
) -> Tensor:
    """Degrees ``[num_nodes]`` int32 that add up to ``total``, in random order."""
    counts = degree_histogram(num_nodes, total, exponent=exponent, max_degree=max_degree)
    return spread_counts(torch.from_numpy(counts).to(device), seed, stream)


def degree_histogram(num_nodes: int, total: int, *, exponent: float, max_degree: int) -> np.ndarray:
    """How many nodes have each degree: ``[max_degree + 1]`` int64, with sum ``num_nodes``.

    No node has degree 0 unless there are fewer edges than nodes.
    """
    _check(num_nodes, total, exponent, max_degree)
    low = 1 if total >= num_nodes else 0
    reach = _reach(exponent, low, max_degree)
    near, far = 1e-9, 1.0
    while _sum(_histogram(num_nodes, far, reach, low)) < total and far < 1e18:
        far *= 4.0
    for _ in range(BISECTIONS):
        middle = (near * far) ** 0.5
        if _sum(_histogram(num_nodes, middle, reach, low)) < total:
            near = middle
        else:
            far = middle
    return _settle(_histogram(num_nodes, near, reach, low), total, low)


def _reach(exponent: float, low: int, max_degree: int) -> np.ndarray:
    """The last rank, in units of r0, whose degree reaches d, for d in ``low + 1 .. max_degree``."""
    degrees = np.arange(low + 1, max_degree + 1, dtype=np.float64)
    return (degrees / max_degree) ** (1.0 - exponent) - 1.0


def _check(num_nodes: int, total: int, exponent: float, max_degree: int) -> None:
    if exponent <= 1.0:
        raise GraphError(f"exponent={exponent}: a power-law exponent must be above 1 (real graphs: 2 to 3.5)")
    if max_degree < 1:
        raise GraphError(f"max_degree={max_degree} must be at least 1")
    if total > num_nodes * max_degree:
        raise GraphError(
            f"{num_nodes} nodes of degree at most {max_degree} cannot hold {total} edges: "
            f"raise max_degree above {total / num_nodes:.1f}"
        )


def _histogram(num_nodes: int, r0: float, reach: np.ndarray, low: int) -> np.ndarray:
    """Nodes per degree for one r0."""
    at_least = np.zeros(low + reach.size + 2, dtype=np.int64)
    at_least[: low + 1] = num_nodes
    at_least[low + 1 : -1] = np.minimum(np.floor(r0 * reach) + 1.0, num_nodes).astype(np.int64)
    return at_least[:-1] - at_least[1:]


def _sum(counts: np.ndarray) -> int:
    return int(np.dot(counts, np.arange(counts.size)))


def _settle(counts: np.ndarray, total: int, low: int) -> np.ndarray:
    """Moves as few nodes as possible to a neighbouring degree until the sum is exact."""
    missing = total - _sum(counts)
    while missing > 0:
        degree = int(np.argmax(counts[:-1]))
        moved = min(missing, int(counts[degree]))
        counts[degree] -= moved
        counts[degree + 1] += moved
        missing -= moved
    while missing < 0:  # only where the hub alone is too much: lower the highest degree
        degree = int(np.flatnonzero(counts)[-1])
        lowered = max(low, degree + missing)
        counts[degree] -= 1
        counts[lowered] += 1
        missing += degree - lowered
    return counts


def hub_draws(num_nodes: int, pairs: int, *, exponent: float, max_degree: int, num_classes: int, same: float) -> int:
    """How many partners the largest hub of an undirected graph must draw to end up with ``max_degree``.

    Half of them, if it were drawn as often as it draws; but a node that draws the hub twice joins it once,
    and a hub is soon joined to most of its own class. With w draws of its own, a node that draws d partners
    joins it with probability ``1 - exp(-d * rate * w)``: at a high rate inside its class, a low one outside.
    """
    half = max(1, -(-max_degree // 2))
    counts = degree_histogram(num_nodes, pairs, exponent=exponent, max_degree=half)
    draws = np.arange(counts.size, dtype=np.float64)
    inside, outside = 1.0 / num_classes, 1.0 - 1.0 / num_classes
    low, high = half, max_degree
    while low < high:
        middle = (low + high) // 2
        drawn = 0.0
        for share, part in ((inside, same), (outside, 1.0 - same)):
            if share > 0.0:
                drawn += share * np.dot(counts, -np.expm1(-draws * part / share * middle / max(1, pairs)))
        low, high = (low, middle) if middle + drawn >= max_degree else (middle + 1, high)
    return low
