"""A search through random small queues with fixed seeds: whatever is queued, every policy keeps to the rules."""

from __future__ import annotations

import pytest

from tests.sched.random_search import random_case, run_checked
from tests.sched.slow_leaving import SlowLeaving
from weft.sched.policies import POLICIES, find_policy

SEEDS = range(300)
FEW = range(120)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "backfill"])
def test_the_other_policies(name):
    for seed in FEW:
        run_checked(find_policy(name), seed)


def test_the_default_policy():
    preempted, passed = 0, 0
    for seed in SEEDS:
        _, watched = run_checked(find_policy("backfill"), seed)
        assert len(watched.passed) == len(set(watched.passed)), "places are made for a task again and again"
        preempted += watched.preempted
        passed += len(watched.passed)
    assert preempted > 20, "the queues have something to preempt"
    assert passed <= preempted // 10, "only what has waited for long may take a place that was made for another"


def test_the_default_policy_while_groups_take_time_to_leave():
    preempted, passed = 0, 0
    for seed in SEEDS:
        run = SlowLeaving(find_policy("backfill"), *random_case(seed))
        run.until_empty()
        assert run.ended | run.refused == {task.id for task in run.tasks}
        assert len(run.passed) <= 1, "places are made for a task again and again"
        preempted += run.policy.preempted
        passed += len(run.passed)
    assert preempted > 20
    assert passed <= preempted // 40
