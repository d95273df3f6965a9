"""The contract of all policies, on random queues and on the awkward ones."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.sched.contract import work_off
from tests.sched.queues import device, machines, queues, task
from weft.core.errors import SpecError
from weft.sched.policies import POLICIES, MPSNoAdmission, find_policy
from weft.sched.queue_state import MachineState
from weft.sched.simulator import simulate

NAMES = list(POLICIES)
SAFE = [name for name in NAMES if not isinstance(find_policy(name), MPSNoAdmission)]
many = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", NAMES)
@many
@given(tasks=queues(), devices=machines)
def test_random_queues(name, tasks, devices):
    work_off(find_policy(name), tasks, devices)


@pytest.mark.parametrize("name", NAMES)
@many
@given(tasks=queues(), devices=machines)
def test_random_queues_in_the_simulator(name, tasks, devices):
    policy = find_policy(name)
    run = simulate(policy, tasks, devices)
    assert {one.id for one in run.tasks} | set(run.refused) == {one.id for one in tasks}
    assert run == simulate(policy, tasks, devices)
    if name in SAFE:
        assert run.peak_bytes <= max(one.task_bytes for one in devices)
    ends = {one.id: one.end for one in run.tasks}
    starts = {one.id: one.start for one in run.tasks}
    for one in tasks:
        assert all(starts[one.id] >= ends[name] for name in one.after if one.id in starts)
        assert starts.get(one.id, one.arrival) >= one.arrival


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_queue(name):
    decision = find_policy(name).schedule([], [], MachineState((device(),)))
    assert decision.start == ()
    assert decision.refuse == {}


@pytest.mark.parametrize("name", SAFE)
def test_a_task_that_never_fits_is_refused_and_so_is_what_depends_on_it(name):
    tasks = [task("huge", 25), task("child", 1, after=("huge",)), task("grandchild", 1, after=("child",)), task("ok")]
    decision = work_off(find_policy(name), tasks, [device()])[0]
    assert set(decision.refuse) == {"huge", "child", "grandchild"}
    assert "28.8 GiB" in decision.refuse["huge"]
    assert "cuda:0" in decision.refuse["huge"]
    assert "huge" in decision.refuse["child"]
    assert decision.started == ("ok",)


@pytest.mark.parametrize("name", SAFE)
def test_a_task_that_fills_the_device_runs_alone(name):
    full = int(26 / 1.15 * (1 << 30))
    tasks = [task("a", 1), task("full", full / (1 << 30)), task("b", 1)]
    work_off(find_policy(name), tasks, [device()])


@pytest.mark.parametrize("name", NAMES)
def test_a_circle_is_an_error(name):
    tasks = [task("a", after=("b",)), task("b", after=("a",))]
    with pytest.raises(SpecError, match="circle"):
        find_policy(name).schedule(tasks, [], MachineState((device(),)))


def test_an_unknown_policy_names_the_known_ones():
    with pytest.raises(SpecError, match=r"no policy 'lmfc'.*did you mean 'lmcf'.*backfill"):
        find_policy("lmfc")
