"""Where things may lie: the order of candidates, what options rule out, and what a cache takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.core.cost import Cost
from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.placement import DataPlacement
from weft.core.run_options import Placement
from weft.core.task import Task
from weft.planner.machine_profiles import PROFILES
from weft.planner.placement import (
    MOST_ROWS,
    candidates,
    chunk_padding_share,
    chunks,
    host_activations,
    reasons,
    with_cache,
)
from weft.planner.transfers import with_batches

H200, CPU = PROFILES["h200"], PROFILES["cpu"]
STATS = GraphStats("g", 1_000_000, 20_000_000, num_features=100, num_classes=10, symmetric=True, max_degree=1000,
                   degree_histogram=(0, 0, 0, 0, 500_000, 500_000), num_train=100_000)  # fmt: skip
TASK = Task(graph="g", model="sage", layers=3, mode="sampled", batch=1000, fanout=[10, 5, 5])


def places(options: Placement = Placement(), machine=H200, stats=STATS, task=TASK):  # noqa: B008
    found = list(candidates(task, stats, machine, options))
    return list(dict.fromkeys((one.features, one.topology, one.evaluation) for one in found))


def test_the_order_of_what_is_tried():
    assert places() == [
        ("gpu", "gpu", "whole"),
        ("gpu", "gpu", "layers"),
        ("cached", "gpu", "layers"),
        ("cached", "host", "layers"),
    ]
    assert not any(one.overlap for one in candidates(TASK, STATS, H200, Placement()))  # it costs more than it hides


def test_options_leave_out_the_others():
    assert places(Placement(features="host")) == [("host", "gpu", "layers"), ("host", "host", "layers")]
    assert places(Placement(features="gpu", topology="gpu")) == [("gpu", "gpu", "whole"), ("gpu", "gpu", "layers")]
    assert places(Placement(cache=1 << 30))[0] == ("cached", "gpu", "layers")
    assert places(Placement(features="disk", topology="disk")) == [("disk", "disk", "layers")]


def test_features_beyond_the_host_stay_on_disk():
    huge = replace(STATS, num_nodes=10**9)
    assert ("disk", "gpu", "layers") in places(stats=huge)
    assert not any(one.overlap for one in candidates(TASK, huge, H200, Placement()) if one.features == "disk")


def test_a_cpu_has_memory_and_files():
    assert places(machine=CPU) == [("host", "host", "whole")]
    assert places(Placement(features="disk"), CPU) == [("disk", "host", "whole")]
    assert places(Placement(cache=100), CPU) == [("cached", "host", "whole")]


def test_lists_are_cached_by_benefit():
    assert next(iter(candidates(TASK, STATS, H200, Placement(topology="cached")))).policy == "benefit"
    with pytest.raises(SpecError, match="topology='cached' with cache_policy='degree': only 'benefit'"):
        places(Placement(topology="cached", cache_policy="degree"))


def test_the_cache_takes_what_is_left():
    start = DataPlacement("cached")
    assert with_cache(start, TASK, STATS, Placement(), 100 << 20).cache_bytes == 100 << 20
    assert with_cache(start, TASK, STATS, Placement(), 1 << 40).cache_bytes == 400_000_000 + 8_000_000
    assert with_cache(start, TASK, STATS, Placement(), 5 << 20) == DataPlacement("host")
    assert with_cache(start, TASK, STATS, Placement(features="cached"), 5 << 20).cache_bytes == 5 << 20
    assert with_cache(start, TASK, STATS, Placement(cache=1 << 20), 1 << 40).cache_bytes == 1 << 20
    assert with_cache(DataPlacement("host"), TASK, STATS, Placement(), 1 << 40) == DataPlacement("host")


def test_what_is_over_pcie_takes_time_and_no_less_beside_training():
    cost = Cost(seconds={"gpu": 0.1}, families={"spmm": 0.1}, phases={"forward": 0.1}, uncorrected={"spmm": 0.1})
    known = {}
    for name, placement in {
        "gpu": DataPlacement(),
        "serial": DataPlacement("host"),
        "overlapped": DataPlacement("host", overlap=True),
        "cached": DataPlacement("cached", cache_bytes=200 << 20, overlap=False),
        "edges": DataPlacement("host", "host"),
    }.items():
        found = with_batches(cost, TASK, STATS, placement, H200)
        assert sum(found.phases.values()) == pytest.approx(found.epoch_seconds)
        known[name] = found.epoch_seconds
    assert known["gpu"] < known["serial"] < known["overlapped"] < known["edges"]
    assert known["gpu"] < known["cached"] < known["serial"]


def test_reasons_name_bytes_and_sizes():
    told = " ".join(reasons(DataPlacement("cached", cache_bytes=1 << 27, overlap=True), TASK, STATS, H200))
    assert "features in pinned host memory (381 MiB), the most used of them also on the GPU" in told
    assert "cache: 128 MiB of the device, chosen by degree, about" in told
    assert "a batch has about" in told
    layers = DataPlacement("host", evaluation="layers")
    assert "evaluated layer by layer in chunks of up to 4,194,304 edges" in " ".join(reasons(layers, TASK, STATS, H200))


def test_only_what_the_splits_depend_on_is_kept():
    few = replace(STATS, num_train=10)
    many = replace(STATS, num_train=1_000_000)
    assert sum(host_activations(TASK, few)) < 0.05 * sum(host_activations(TASK, many))


def test_chunks_that_end_at_their_nodes_are_not_full_of_edges():
    stats = replace(STATS, num_nodes=100_000_000, num_edges=1_600_000_000)
    large, small = (DataPlacement(evaluation="layers", chunk_edges=1 << power) for power in (22, 18))
    mean = 16.0 * MOST_ROWS  # 65,536 nodes have a million edges, of the four millions that a chunk may have
    assert chunk_padding_share(large, stats) == pytest.approx((MOST_ROWS + mean) / (MOST_ROWS + (1 << 22)), rel=1e-3)
    assert chunk_padding_share(small, stats) == pytest.approx(1.0, rel=1e-3)
    assert chunk_padding_share(large, STATS) == 1.0  # reads about all nodes
    assert chunk_padding_share(DataPlacement(), stats) == 1.0


def test_chunks_cover_all_edges_and_nodes():
    assert chunks(DataPlacement(), STATS) == 1
    assert chunks(DataPlacement(evaluation="layers", chunk_edges=1 << 20), STATS) == 20
    assert chunks(DataPlacement(evaluation="layers", chunk_edges=1 << 30), STATS) == 16
