"""Sharded tasks: all ranks start at once, on devices that hold them, without starving and as one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sched.queues import GIB, device, task
from tests.sched.random_search import random_case, run_checked
from tests.sched.slow_leaving import SlowLeaving
from weft.core.errors import SpecError
from weft.sched.policies import POLICIES, Backfill, find_policy
from weft.sched.queue_state import DeviceState, MachineState, RunningGroup
from weft.sched.simulator import simulate

NAMES = list(POLICIES)
TWO = (device(name="cuda:0"), device(name="cuda:1"))


def decide(tasks, running=(), devices=TWO, now=0.0):
    return Backfill().schedule(tasks, list(running), MachineState(tuple(devices), now))


def running(name, place, *, size=1.0, ends=100.0, utilisation=1.0, **more):
    return RunningGroup(name, place, (f"{name}-0",), int(size * GIB), utilisation, ends=ends, **more)


def stream(count, seconds=3.0, gap=1.0, **more):
    """Small tasks that arrive one after another, more than the devices can keep up with."""
    return [task(f"small{i:03}", 1, seconds, arrival=gap * i, **more) for i in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_has_a_device_of_its_own_if_there_are_as_many(name):
    decision = find_policy(name).schedule([task("wide", 10, ranks=2)], [], MachineState(TWO))
    [start] = decision.start
    assert start.places == ("cuda:0", "cuda:1")
    assert start.device == "cuda:0"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", [1, 2])
def test_ranks_share_a_device_if_there_is_one(name, workers):
    one = device(name="cpu", workers=workers)
    decision = find_policy(name).schedule([task("wide", 10, ranks=2)], [], MachineState((one,)))
    assert [start.places for start in decision.start] == [("cpu", "cpu")]


def test_three_ranks_on_two_devices_are_spread_evenly():
    [start] = decide([task("wide", 5, ranks=3)]).start
    assert sorted(start.places) == ["cuda:0", "cuda:0", "cuda:1"]


def test_the_bytes_of_every_rank_count_on_its_device():
    wide = running("wide", "cuda:0", size=20, utilisation=0.1, devices=("cuda:0", "cuda:1"))
    decision = decide([task("other", 10, utilisation=0.1)], [wide])
    assert decision.start == ()
    assert "6.00 GiB free" in decision.wait["other"]


def test_ranks_do_not_start_on_some_of_their_devices():
    decision = decide([task("wide", 1, ranks=2)], [running("a", "cuda:0"), running("b", "cuda:0")])
    assert decision.start == ()
    assert decision.wait["wide"] == "waits for a free worker of cuda:0; its 2 ranks start together"


def test_short_tasks_fill_the_device_until_the_other_is_free_and_long_ones_do_not():
    held = [running("a", "cuda:0", ends=100.0), running("b", "cuda:0", ends=100.0)]
    wide = task("wide", 1, 50, ranks=2)
    short, long = task("short", 1, 60, utilisation=0.4), task("long", 1, 150, utilisation=0.4)
    decision = decide([wide, short, long], held)
    assert [(start.members, start.device) for start in decision.start] == [(("short",), "cuda:1")]
    assert decision.wait["long"] == "would delay a sharded task that waits for cuda:1"


def test_ranks_of_a_cluster_are_on_one_node():
    nodes = tuple(device(name=f"cuda:{number}@{node}") for node in "ab" for number in (0, 1))
    held = [running(name, "cuda:0@a", ends=9.0) for name in "xy"]
    [start] = decide([task("wide", 1, ranks=2)], held, nodes).start
    assert start.places == ("cuda:0@b", "cuda:1@b")
    apart = [replace(one, workers=1) for one in nodes[::2]]
    spread = decide([task("wide", 1, ranks=2)], devices=apart).start[0].places
    assert len({place.partition("@")[2] for place in spread}) == 1


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mps"])
def test_ranks_that_no_host_holds_are_refused_and_so_is_what_depends_on_them(name):
    tasks = [task("wide", 20, ranks=3), task("child", 1, after=("wide",)), task("two", 20, ranks=2)]
    run = simulate(find_policy(name), tasks, TWO)
    assert set(run.refused) == {"wide", "child"}
    assert "its 3 ranks need 23.0 GiB each" in run.refused["wide"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_of_small_tasks_does_not_starve_a_sharded_one(workers):
    """It starts when those are done that may pass it: shorter, and come before ten times its seconds have passed."""
    wide, small = task("wide", 1, 20.0, arrival=5.0, ranks=2), stream(400)
    run = simulate(Backfill(), [*small, wide], [device(name=f"cuda:{n}", workers=workers) for n in (0, 1)])
    passing = sum(one.seconds for one in small if one.arrival + 10 * one.seconds <= wide.arrival + 10 * wide.seconds)
    starts = {one.id: one.start for one in run.tasks}
    assert starts["wide"] <= passing / 2 + 2 * 3.0
    assert max(starts.values()) > 500.0, "the stream goes on for much longer"


@pytest.mark.parametrize("name", ["sequential", "base", "pipeswitch", "mps"])
def test_nothing_passes_a_sharded_task_where_the_order_is_that_of_arrival(name):
    wide = task("wide", 1, 20.0, arrival=5.0, ranks=2)
    run = simulate(find_policy(name), [*stream(100), wide], [device(name=f"cuda:{n}", workers=1) for n in (0, 1)])
    starts = {one.id: one.start for one in run.tasks}
    assert all(starts["wide"] <= one.start for one in run.tasks if one.arrival > wide.arrival)


def test_a_sharded_task_starts_when_what_ran_before_it_has_ended():
    """First in the order, it waits for no more than the longest group that runs."""
    tasks = [task("a", 1, 30.0), task("b", 1, 80.0), task("wide", 1, 500.0, arrival=1.0, ranks=2, priority=1)]
    tasks += [replace(one, arrival=one.arrival + 2.0) for one in stream(100, seconds=9.0)]
    run = simulate(Backfill(preempt_seconds=1e9), tasks, [device(name=f"cuda:{n}", workers=1) for n in (0, 1)])
    starts = {one.id: one.start for one in run.tasks}
    assert starts["wide"] == pytest.approx(80.0)
    assert any(30.0 <= starts[one.id] < 71.0 for one in tasks if one.id.startswith("small")), "short ones pass it"


def test_an_urgent_sharded_task_preempts_on_every_device_that_it_lacks():
    held = [running("a", "cuda:0", ends=1e6), running("b", "cuda:1", ends=1e6)]
    one_worker = [replace(one, workers=1) for one in TWO]
    decision = decide([task("wide", 1, ranks=2, priority=1), task("other", 1)], held, one_worker, now=1.0)
    assert set(decision.preempt) == {"a", "b"}
    assert decision.start == ()
    leaving = [replace(held[0], leaving=True)]
    kept = decide([task("wide", 1, ranks=2, priority=1), task("other", 1)], leaving, one_worker, now=2.0)
    assert kept.start == (), "what was made free is kept while the other leaves"


def test_a_sharded_task_is_preempted_as_one():
    wide = running("wide", "cuda:0", size=10, ends=1e6, devices=("cuda:0", "cuda:1"))
    decision = decide([task("urgent", 25 / 1.15, priority=1)], [wide], now=1.0)
    assert decision.preempt == ("wide",)
    tasks = [task("wide", 12, 1000.0, ranks=2), task("urgent", 20, 10.0, priority=1, arrival=100.0)]
    run = simulate(Backfill(), tasks, TWO)
    assert {one.id: one.end for one in run.tasks} == pytest.approx({"urgent": 110.0, "wide": 1010.0})
    assert [one.places for one in run.groups if one.members == ("wide",)] == [("cuda:0", "cuda:1")] * 2


def test_ranks_are_as_fast_as_the_slowest():
    both = [replace(one, workers=2) for one in TWO]
    run = simulate(find_policy("mps"), [task("wide", 1, 100.0, ranks=2), task("beside", 1, 50.0)], both)
    ends = {one.id: one.end for one in run.tasks}
    assert ends["wide"] > 100.0
    assert run.metrics().utilisation <= 1.0


def test_a_user_is_charged_for_every_rank():
    assert task("wide", 1, 10.0, ranks=3).work == pytest.approx(30.0)


def test_an_inference_task_has_one_rank():
    with pytest.raises(SpecError, match="ranks=2"):
        task("answer", 1, kind="inference", ranks=2)


@pytest.mark.parametrize("name", NAMES)
def test_random_queues_with_sharded_tasks(name):
    """Every decision is checked: no device above its budget or workers, no task on some of its devices only."""
    for seed in range(120):
        run, _ = run_checked(find_policy(name), seed, sharded=True)
        budgets = {one.name: one.task_bytes for one in random_case(seed, sharded=True)[1]}
        for time in {one.start for one in run.groups}:
            for name_, room in budgets.items() if name != "mps" else ():
                live = [one for one in run.groups if one.start <= time < one.end]
                assert sum(one.bytes * one.places.count(name_) for one in live) <= room


def test_random_queues_with_sharded_tasks_while_groups_take_time_to_leave():
    for seed in range(120):
        run = SlowLeaving(find_policy("backfill"), *random_case(seed, sharded=True))
        run.until_empty()
        assert run.ended | run.refused == {one.id for one in run.tasks}


def test_a_device_of_unequal_size_takes_fewer_ranks():
    unequal = [DeviceState("cuda:0", 6 * GIB), DeviceState("cuda:1", 13 * GIB)]
    [start] = decide([task("wide", 5, ranks=3)], devices=unequal).start
    assert start.places == ("cuda:1", "cuda:1", "cuda:0")
