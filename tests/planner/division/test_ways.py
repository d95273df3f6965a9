"""Ways are priced by one side and by divisions; what leaves no room, or needs a setting, displaces no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.division.cases import times
from weft.core.cost import Cost
from weft.core.graph_stats import GraphStats
from weft.core.placement import DataPlacement
from weft.core.run_options import Placement
from weft.core.task import Task
from weft.planner.division import ways as ways_module
from weft.planner.division.ways import BESIDES_WAITING, Pricing, Way, batch_bytes
from weft.planner.machine_profiles import profile

GB = 10**9
STATS = GraphStats(
    "g", 2_000_000, 60_000_000, num_features=100, num_classes=10, symmetric=True, num_train=200_000, max_degree=5000,
    degree_histogram=(0, 1000, 10_000, 100_000, 500_000, 800_000, 400_000, 150_000, 30_000, 8_000, 900, 90, 10),
)  # fmt: skip
HOST, GPU = DataPlacement("host", "host", overlap=True), DataPlacement()
SLOW_GPU = times(host=0.14, dma=0.004, sample=0.002, uva=0.01, train=0.002, bytes=GB // 10)


def task(**changes) -> Task:
    usual = {"model": "sage", "mode": "sampled", "fanout": [15, 10, 5], "batch": 1024}
    return Task(graph="g", layers=3, **{**usual, **changes})


def way(placement=HOST, bytes=4 * GB, seconds=0.4, **changes) -> Way:
    training = Cost(seconds={"gpu": seconds}, phases={"forward": seconds})
    return Way(changes.pop("task", task()), placement, training, bytes, **changes)


def pricing(budget=12 * GB, measured=lambda way: None, **options) -> Pricing:
    return Pricing(STATS, profile("h200"), budget, measured, Placement(**options))


def best(ways, budget=12 * GB, **options) -> Way:
    fitting = [one for one in pricing(budget, **options).price(ways) if one.device_bytes <= budget]
    return min((one for one in fitting if not one.condition), key=lambda one: one.seconds_per_task)


def test_features_on_the_gpu_are_fastest_and_not_divided():
    found = pricing().price([way(GPU, 10 * GB), way()])
    fastest = min(found, key=lambda one: one.seconds)
    assert fastest.placement == GPU
    assert all(one.division is None for one in found if one.placement == GPU)
    assert any(one.division is not None for one in found)


def test_measured_phases_decide_over_predicted_ones():
    found = best([way()], measured=lambda one: SLOW_GPU)
    assert found.division.elastic
    assert found.measured
    slow_host = times(host=500.0, dma=0.004, sample=0.001, uva=0.002, train=0.02)
    alone, *divided = pricing(measured=lambda one: slow_host).price([way()])
    assert all(one.seconds > 0.97 * alone.seconds for one in divided)  # a hopeless host helps with few batches


@pytest.mark.parametrize(("division", "share"), [("fixed", None), (0.25, 0.25), (0.0, 0.0)])
def test_a_strategy_or_a_share_can_be_set(division, share):
    found = pricing(measured=lambda one: SLOW_GPU, division=division).price([way()])
    divided = [one.division for one in found if one.division is not None]
    assert divided
    assert all(one.strategy == "fixed" for one in divided)
    if share is not None:
        assert all(one.device_share == pytest.approx(share, abs=0.03) for one in divided)


def test_all_batches_by_the_gpu_are_no_division():
    found = pricing(measured=lambda one: SLOW_GPU, division=1.0).price([way()])
    assert [one.division for one in found] == [None]


def test_buffers_and_pinned_memory_keep_to_the_budget():
    found = best([way()], measured=lambda one: SLOW_GPU)
    assert found.device_bytes <= 12 * GB
    assert found.host_bytes <= 0.25 * profile("h200").host.memory_bytes
    waiting = found.division.device_buffer
    assert found.device_bytes == 4 * GB + (waiting + BESIDES_WAITING) * batch_bytes(task(), STATS)
    assert best([way()], budget=4 * GB + 1000, measured=lambda one: SLOW_GPU).division is None  # no room for a buffer


def test_ways_that_leave_no_room_for_batches_displace_none_that_do():
    """They have the larger caches, and so the lower bounds."""
    budget, size = 12 * GB, batch_bytes(task(), STATS)
    cached = [replace(HOST, features="cached", cache_bytes=(6 - share) * GB) for share in range(4)]
    full = [way(placement, bytes=budget - size) for placement in cached]
    leaves_room = way(bytes=budget - (BESIDES_WAITING + 2) * size)
    found = best([*full, leaves_room], budget, measured=lambda one: SLOW_GPU)
    assert found.division.device_buffer == 2
    assert found.device_bytes <= budget


def test_ways_that_need_a_setting_displace_none_that_need_none():
    """Faster ones that cannot be taken must not keep the division that can be from being simulated."""
    faster = times(host=0.07, dma=0.002, sample=0.001, uva=0.005, train=0.001, bytes=GB // 20)
    others = [
        way(HOST, size * GB, 0.2, task=task(precision="bf16"), condition="precision='bf16'") for size in (3, 4, 5)
    ]
    phases = lambda one: faster if one.condition else SLOW_GPU  # noqa: E731
    alone, among = best([way()], measured=phases), best([way(), *others], measured=phases)
    assert alone.division.divided
    assert among.division == alone.division
    assert among.seconds == alone.seconds
    named = [one for one in pricing(measured=phases).price([way(), *others]) if one.condition and one.division]
    assert "needs precision='bf16'" in named[0].words()


def test_what_was_simulated_is_not_simulated_again(monkeypatch):
    """A search continues with a way more after its dry run."""
    mine, ways, runs = pricing(), [way(), way(bytes=5 * GB)], []
    first = [(one.division, one.seconds) for one in mine.price(ways)]
    plain = ways_module.partition
    monkeypatch.setattr(ways_module, "partition", lambda *given: runs.append(given) or plain(*given))
    assert [(one.division, one.seconds) for one in mine.price(ways)] == first
    assert runs == []
    mine.price([*ways, way(bytes=3 * GB)])
    assert runs


def test_tasks_that_share_batches_are_compared_per_task():
    found = best([way(GPU, 6 * GB, 0.4), way(GPU, 9 * GB, 1.0, members=8)])
    assert found.members == 8
    assert found.seconds_per_task == pytest.approx(found.seconds / 8)
    assert "8 tasks" in found.words()


def test_moving_things_changes_the_bytes_and_is_said_to_be_rough():
    base = way(HOST, 4 * GB, 0.4)
    near = base.elsewhere(GPU, STATS)
    assert near.device_bytes == 4 * GB + 2_000_000 * 400 + 4 * 60_000_000 - batch_bytes(task(), STATS)
    assert "about" in pricing().price([near])[0].figures()
    back = way(GPU, 4 * GB, 0.4).elsewhere(HOST, STATS)
    assert back.device_bytes - 4 * GB == batch_bytes(task(), STATS) - 2_000_000 * 400 - 4 * 60_000_000
