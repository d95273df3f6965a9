"""Seconds that taking rows by cluster saves in an epoch, and seconds that finding the clusters takes.

Measured on an H200 (suites spmm, multi_kernels): of the time of sparse products nothing is gained on the pubmed shape
and for one task on arxiv's, 10 % for 4 tasks and 12 % for 16, 30 to 35 % on products, whose rows do not stay in the L2.
Finding clusters takes 15 ms for 2.5 M edges and 0.19 s for 124 M, and some seconds the first time on a machine, when a
kernel is compiled for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.planner.cost.rule_of_thumb import gathered_bytes

GAIN_IN_CACHE, GAIN_BEYOND = 0.1, 0.3  # of the seconds of sparse products
GATHERED = 7e12  # bytes per second, from the L2
CLUSTER_SECONDS, CLUSTER_SECONDS_AN_EDGE = 0.1, 1.5e-9


def seconds_saved(tasks: Sequence[Task], stats: GraphStats, epochs: int, beyond_cache: bool) -> float:
    """What ``epochs`` epochs gain; ``beyond_cache``: the hidden rows of all nodes do not fit in the cache."""
    seconds = gathered_bytes(tasks, stats) / GATHERED
    return epochs * seconds * (GAIN_BEYOND if beyond_cache else GAIN_IN_CACHE)


def seconds_to_find(stats: GraphStats) -> float:
    """What finding the clusters takes."""
    return CLUSTER_SECONDS + CLUSTER_SECONDS_AN_EDGE * stats.num_edges
