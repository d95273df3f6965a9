"""Predict how fast rows are gathered by index, from their width and the share of cache hits.

A kernel processes the features of all rows in tiles, so a tile of every row has to stay in the cache, not the
whole matrix. Where even that is too much, a skewed graph still keeps its busiest rows there: with the degrees of
ogbn-products a few per cent of the rows are most of the fetches.
"""

from __future__ import annotations

from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine

TILE_BYTES = 256  # 64 features of float32, the tile of the SpMM kernels
USABLE_CACHE = 0.5  # the rest holds indices, results, and what the two halves of a large cache keep twice
VECTOR_BYTES = 16  # what one lane loads at once, if rows begin at multiples of it
# Rows that do not are loaded number by number. Among the measured epochs (benchmarks/results/epoch.json) only those of
# the products shape aggregate many such rows (47 classes, 188 bytes), and they come out a third too short unless these
# count double; those of the other shapes come out right.
UNALIGNED = 2.0
# A table this small stays in the first-level cache of every multiprocessor: weights that sparse features pick among.
# The epochs of the pubmed shape (benchmarks/results/estimates.json) fit about this factor.
NEAR_BYTES = 192 << 10
NEARER = 2.5


def gather_seconds(
    gather_bytes: float, row_bytes: float, rows: int, machine: Machine, stats: GraphStats | None = None
) -> float:
    """Seconds to fetch ``gather_bytes`` in rows of ``row_bytes`` out of a table of ``rows``."""
    if machine.device == "cuda" and row_bytes % VECTOR_BYTES:
        gather_bytes *= UNALIGNED
    if machine.device == "cuda" and rows * row_bytes <= NEAR_BYTES:
        return gather_bytes / (NEARER * machine.gather_rate(row_bytes, cached=True))
    hot = cached_share(min(row_bytes, TILE_BYTES), rows, machine, stats)
    cached, cold = (machine.gather_rate(row_bytes, cached=where) for where in (True, False))
    return gather_bytes * (hot / cached + (1.0 - hot) / cold)


def cached_share(tile_bytes: float, rows: int, machine: Machine, stats: GraphStats | None = None) -> float:
    """Share of the fetches that find their row's tile in the cache, the busiest rows being kept there."""
    room = USABLE_CACHE * machine.l2_bytes / max(tile_bytes, 1.0)
    if room >= rows or rows <= 0:
        return 1.0
    if stats is None or not stats.symmetric or rows != stats.num_nodes or not stats.degree_histogram:
        # Degrees are in-degrees: of a directed graph they do not say which sources are busy.
        return room / rows
    return edges_of_busiest(stats, room) / max(stats.num_edges, 1)


def edges_of_busiest(stats: GraphStats, nodes: float) -> float:
    """How many edges start at the ``nodes`` busiest nodes, from the histogram of degrees."""
    bins = [count * _mean_degree(length, stats.max_degree) for length, count in enumerate(stats.degree_histogram)]
    scale = stats.num_edges / max(sum(bins), 1.0)
    edges, left = 0.0, nodes
    for length in range(len(bins) - 1, -1, -1):
        count = stats.degree_histogram[length]
        if left <= count:
            return edges + scale * bins[length] * left / max(count, 1)
        edges, left = edges + scale * bins[length], left - count
    return edges


def _mean_degree(length: int, max_degree: int) -> float:
    """The mean of the degrees with that bit length, their density falling as a power law's: low ones prevail."""
    low, high = (1 << length) // 2, (1 << length) - 1
    return 1.4 * low if high <= max_degree else (low + max(max_degree, low)) / 2
