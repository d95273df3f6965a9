"""The search for a launch runs on all ranks together, ends alike on each, and is kept per machine and shape."""

from __future__ import annotations

import itertools
import json

from tests.dist.cases import CPU
from tests.graphs_for_tests import tiny_graph
from weft.core.task import Task
from weft.dist.launch import start_ranks
from weft.dist.ranks import Ranks
from weft.dist.sharded_adjacency import ShardGraph
from weft.engine.home import machine_folder
from weft.engine.sharded_job import choose_launch, search_launch, shape_of
from weft.ops.sharded.sharded_spmm import ShardedLaunch
from weft.planner.kernel_tuner import KernelConfig
from weft.planner.partition import split_by_edges

TASKS = (Task(graph="tiny", model="gcn", hidden=8),)
MACHINE = "a machine"


def tune(ranks: Ranks) -> tuple[list, ShardedLaunch, str, str]:
    """Search on a shard, choose a launch, choose it again."""
    whole = tiny_graph()
    adj = ShardGraph(whole, split_by_edges(whole.adj.indptr.tolist(), ranks.ranks).bounds, ranks).adj
    search = search_launch(adj, shape_of(adj, 8, ranks), ranks)
    assert ranks.staging.launch == ShardedLaunch(way="fetched"), "a search leaves the launch as it was"
    assert not any(isinstance(key, tuple) for key in adj._derived), "nothing that was tried is kept"
    first = choose_launch(adj, TASKS, ranks, MACHINE)
    launch = ranks.staging.launch
    second = choose_launch(adj, TASKS, ranks, MACHINE)
    every = ranks.gather_objects((list(search.trials.items()), launch, first, second))
    assert all(one == every[0] for one in every), "ranks found different launches"
    return every[0]


def test_ranks_search_together_and_keep_what_they_found():
    with start_ranks(2, CPU, tune, timeout=120) as here:
        trials, launch, first, second = tune(here)
        shape = shape_of_tiny(here)
    assert trials[0][0] == KernelConfig()
    assert "iterations" in first
    assert "found before" in second
    kept = json.loads((machine_folder(MACHINE) / f"sharded-kernel-2-{shape.key()}.json").read_text())
    assert launch == ShardedLaunch(kept["ps"], kept["dist"], kept["wpb"], kept["way"])
    assert [config.way for config, _ in trials[-3:]] == ["tiles", "interleaved", "fetched"], (
        "the other ways are tried once"
    )
    assert {config.way for config, _ in trials[:-3]} == {"staged"}


def shape_of_tiny(ranks: Ranks):
    """The shape of the fuller of two ranks, counted apart from the code under test."""
    from tests.planner.partition_reference import shard_edges
    from weft.planner.kernel_tuner import KernelShape

    whole = tiny_graph()
    indptr, indices = whole.adj.indptr.tolist(), whole.adj.indices.tolist()
    found = split_by_edges(indptr, ranks.ranks)
    shards = [shard_edges(indptr, indices, found, rank) for rank in range(ranks.ranks)]
    return KernelShape(
        8,
        max(len(shard.local_indices) for shard in shards),
        max(len(shard.remote_indices) for shard in shards),
        max(high - low for low, high in itertools.pairwise(found.bounds)),
    )
