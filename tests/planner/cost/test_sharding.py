"""The stated model of ranks: one rank is one device, more ranks take less memory each and more of the link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.core.cost import Cost
from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.planner.cost.sharding import (
    HOST_MEMORY,
    INFINIBAND,
    NVLINK4,
    OverRanks,
    estimate_sampled_sharding,
    estimate_sharding,
    exchange_widths,
    link_of,
    remote_nodes,
)
from weft.planner.machine_profiles import PROFILES

STATS = GraphStats(
    "big", 10**6, 5 * 10**7, 100, num_classes=40, symmetric=True, degree_histogram=(0, 0, 0, 0, 0, 500_000, 500_000)
)
COST = Cost(
    peak_bytes=8 * 10**9,
    reserved_bytes=9 * 10**9,
    total_bytes=10 * 10**9,
    bytes={"activation": 6 * 10**9, "graph": 10**9, "weight": 10**6, "state": 2 * 10**6},
    seconds={"gpu": 0.5},
    families={"spmm": 0.45, "launch": 0.001},
)
TASK = Task(graph="big", model="gcn", hidden=64, layers=3)


def of(ranks, link=NVLINK4, fixed_bytes=0, **more):
    return estimate_sharding([TASK], COST, STATS, OverRanks(ranks, link, 20_000, fixed_bytes), **more)


def test_one_rank_is_one_device():
    one = of(1)
    assert one.halo_nodes == 0
    assert one.link_bytes == 0
    assert one.link_seconds == 0.0
    assert one.speed_up == pytest.approx(1.0)
    assert one.bytes_per_rank == COST.peak_bytes
    assert of(1, fixed_bytes=5).bytes_per_rank == COST.peak_bytes + 5


def test_more_ranks_take_less_memory_each_and_are_faster():
    found = [of(ranks) for ranks in (2, 4, 8)]
    assert found[0].bytes_per_rank > found[1].bytes_per_rank > found[2].bytes_per_rank
    assert 1.0 < found[0].speed_up < found[1].speed_up < 8
    assert all(one.overlapped_speed_up >= one.speed_up for one in found)
    assert "4 ranks over nvlink" in str(found[1])
    assert found[1].to_dict()["speed_up"] == found[1].speed_up


def test_a_slower_link_takes_longer():
    assert of(8, INFINIBAND).link_seconds > of(8).link_seconds
    assert of(8, HOST_MEMORY).speed_up < of(8).speed_up


def test_a_rank_never_reads_more_nodes_than_there_are():
    for ranks in (2, 8, 512):
        assert 0 < remote_nodes(STATS, ranks) <= STATS.num_nodes
    assert remote_nodes(GraphStats("flat", 100, 300), 4) > 0


def test_widths_by_layer():
    assert exchange_widths(TASK, STATS) == ([64, 64, 40], [64, 40])
    assert exchange_widths(TASK, STATS, first_once=True) == ([64, 40], [64, 40])
    gat = Task(graph="big", model="gat", hidden=64, heads=8, layers=2)
    assert exchange_widths(gat, STATS) == ([72, 48], [48])


SAMPLED = Task(graph="big", model="sage", hidden=64, layers=2, mode="sampled", fanout=[10, 5], batch=1000)
TRAINED = replace(STATS, num_train=100_000)
BATCHES = replace(COST, phases={"forward": 0.4, "evaluation": 0.1}, training_bytes=3 * 10**9)


def sampled(ranks, link=NVLINK4):
    """Over ranks, if an epoch takes as long with smaller batches."""
    return estimate_sampled_sharding([SAMPLED], BATCHES, BATCHES, TRAINED, OverRanks(ranks, link, 20_000), 400)


def test_one_rank_of_sampled_training_is_one_device():
    one = sampled(1)
    assert one.link_seconds == 0.0
    assert one.halo_nodes == 0
    assert one.speed_up == pytest.approx(1.0)


def test_ranks_of_sampled_training_share_steps_and_read_while_they_train():
    found = [sampled(ranks) for ranks in (2, 4, 8)]
    assert found[0].batch_nodes > found[1].batch_nodes > found[2].batch_nodes > 0
    assert all(one.epoch_seconds > one.overlapped_seconds for one in found)
    assert all(1.0 < one.overlapped_speed_up <= one.ranks for one in found)
    assert sampled(4, INFINIBAND).link_seconds > found[1].link_seconds
    assert "360 GB/s into every rank" in str(found[1])


def test_links_and_mistakes():
    assert link_of(PROFILES["h200"], 8) is NVLINK4
    assert link_of(PROFILES["h200"], 9) is INFINIBAND, "a host has eight GPUs"
    assert link_of(PROFILES["cpu"]) is HOST_MEMORY
    with pytest.raises(SpecError, match="ranks=0"):
        of(0)
