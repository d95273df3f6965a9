"""Tune the launch of the sharded kernel before the first epoch: time some aggregations, and keep the fastest launch.

The search is the cross-iteration search of :mod:`weft.planner.kernel_tuner`. Its iterations are aggregations of numbers
of their own, not training steps: pieces of other sizes are summed in another order, so a launch that changed while
training would change the bits of what is trained. All ranks try the same launches, and the slowest rank counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from weft.core.settings.sharded_ways import WAYS
from weft.dist.ranks import Ranks
from weft.dist.sharded_adjacency import ShardedAdjacency
from weft.ops.sharded.shard import ShardedLaunch
from weft.planner.kernel_tuner import CrossIterationSearch, KernelConfig, KernelShape, Multiprocessors, search_for

WARM, TIMED = 2, 3  # aggregations with every launch: the first compile the kernel and build its pieces


def launch_of(config: KernelConfig) -> ShardedLaunch:
    """The kernel's launch for a configuration of the search."""
    return ShardedLaunch(config.ps, config.dist, config.wpb, config.way)


def shape_of(adj: ShardedAdjacency, features: int, ranks: Ranks) -> KernelShape:
    """The shape that the fullest rank has: the same on all ranks."""
    columns, rows = adj.forward.columns, adj.forward
    remote = int(((columns < rows.low) | (columns >= rows.high)).sum())
    every = ranks.gather_objects((columns.numel() - remote, remote, adj.num_rows))
    local, far, most = (max(one[place] for one in every) for place in range(3))
    return KernelShape(features, local, far, most)


def multiprocessors(device: torch.device) -> Multiprocessors:
    """Those of ``device``."""
    if device.type != "cuda":
        return Multiprocessors()
    about = torch.cuda.get_device_properties(device)
    return Multiprocessors(count=about.multi_processor_count)


def time_aggregation(adj: ShardedAdjacency, features: int, ranks: Ranks) -> Callable[[KernelConfig], float]:
    """Seconds of one aggregation of rows of ``features`` numbers by the slowest rank, as a function of the launch."""
    x = torch.randn(adj.num_rows, features, device=adj.device)
    before = ranks.staging.launch

    def took(config: KernelConfig) -> float:
        ranks.staging.launch = launch_of(config)
        probe = adj.apart()  # pieces of a launch that is not kept go with it
        samples = []
        try:
            for turn in range(WARM + TIMED):
                ranks.barrier.wait()
                begin = time.perf_counter()
                probe.aggregate(x)
                if x.is_cuda:
                    torch.cuda.synchronize(x.device)
                samples += [time.perf_counter() - begin] if turn >= WARM else []
        finally:
            ranks.staging.launch = before
        return max(ranks.gather_objects(median(samples)))

    return took


def search_launch(adj: ShardedAdjacency, shape: KernelShape, ranks: Ranks) -> CrossIterationSearch:
    """The whole search on ``adj``, on all ranks together, then the other ways; each of them finds the same."""
    search = search_for(shape, multiprocessors(adj.device))
    took = time_aggregation(adj, shape.features, ranks)
    while not search.finished:
        search.tell(took(search.next()))
    for other in [replace(search.best, way=way) for way in WAYS if way != search.best.way]:
        search.also(other, took(other))
    return search
