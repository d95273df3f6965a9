"""Elastic divisions need no ratio: they are as fast as the best of all ratios, and follow a host that slows down."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.division.cases import BESIDE, times
from tests.planner.division.test_recorded_divided_epochs import BATCHES, REGISTRY, RUNS, WORKERS, complete
from weft.core.division import HOST, Division, PhaseTime, PhaseTimes
from weft.planner.division import simulator
from weft.planner.division.adapting import Adapter, contenders
from weft.planner.division.partitioner import Limits, best_share, overlap_for, partition
from weft.planner.division.simulator import bound, loads, simulate, violations

PROFILES = [(run, one["shape"], one["model"]) for run, found in RUNS.items() for one in found["profiles"]]
INSIDE = Limits(WORKERS + 4, 4, WORKERS, in_step=True, lead=14)
SECONDS = st.floats(0.05, 10.0)


def varied(measured: PhaseTimes) -> PhaseTimes:
    """Batches of the host vary by 15 %."""
    host = measured.of("batching_cpu")
    return replace(measured, phases={**measured.phases, "batching_cpu": PhaseTime(host.mean, 0.15 * host.mean)})


def elastic(share: float, workers: int = WORKERS) -> Division:
    limits = replace(INSIDE, elastic=True, workers=workers, host_buffer=workers + 4)
    return overlap_for(share, limits, "gpu", workers)


def seconds(division: Division, measured: PhaseTimes, seed: int | None = None) -> float:
    return simulate(division, measured, BATCHES, REGISTRY, seed).seconds


@pytest.mark.parametrize("profile", PROFILES, ids=str)
@pytest.mark.parametrize("workers", [14, 8])
def test_as_fast_as_the_best_of_all_ratios(profile, workers):
    measured = varied(complete(*profile))
    limits = replace(INSIDE, workers=workers, host_buffer=workers + 4)
    ratios = [overlap_for(step / 20, limits, "gpu", workers) for step in range(2, 19)]
    best = min(seconds(one, measured, 1) for one in ratios)
    chosen = partition(measured, REGISTRY, BATCHES, Limits(workers + 4, 4, workers)).tried
    (found,) = (one for one, _ in chosen if one.elastic)
    assert seconds(found, measured, 1) <= 1.035 * best


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_a_ratio_that_is_far_off_costs_little(profile):
    """Fixed, three batches of the device's per one of the host's take up to a third longer than the best."""
    measured = complete(*profile)
    near, far = elastic(0.4), elastic(0.75)
    fixed = replace(far, elastic=False)
    lost, stays = (seconds(one, measured) / seconds(near, measured) for one in (far, fixed))
    assert lost <= max(0.6 * (stays - 1.0), 0.03) + 1.0


@settings(max_examples=100, deadline=None)
@given(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), st.integers(1, 4), st.integers(1, 6), st.integers(1, 60))
def test_schedules_keep_to_the_constraints(five, workers, buffer, batches):
    division = Division(1, 1, workers, buffer, buffer, in_step=True, lead=3, elastic=True)
    found = simulate(division, times(*five), batches, BESIDE)
    assert violations(found, BESIDE) == []
    assert sum(one.key == "training_gpu" for one in found.activities) == batches
    assert max(found.utilisation().values()) <= 1.0 + 1e-9
    by_resource = loads(times(*five), BESIDE, "gpu", workers, in_step=True)
    del by_resource[HOST]  # which has begun some batches of an epoch before it, and begins some of the next
    assert found.seconds >= batches * bound(by_resource, best_share(by_resource)) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), st.integers(1, 4), st.integers(1, 6), st.integers(1, 24))
def test_short_epochs_are_simulated_as_the_mean_of_many(five, workers, buffer, batches):
    """One alone may have had most of its batches begun by the one before it."""
    division = Division(1, 1, workers, buffer, buffer, in_step=True, lead=3, elastic=True)
    few = simulate(division, times(*five), batches, BESIDE).seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "BEFORE", 512)
        many = simulate(division, times(*five), batches, BESIDE).seconds
    assert few == pytest.approx(many, rel=0.15)


def test_a_slower_host_is_given_less_without_dividing_anew():
    profile = complete(*PROFILES[0])
    share = [
        sum(one.key == "batching_cpu" for one in simulate(elastic(0.4), measured, BATCHES, REGISTRY).activities)
        for measured in (profile, profile.scaled(batching_cpu=1.5), profile.scaled(batching_cpu=2.5))
    ]
    assert share[0] > 1.2 * share[1] > 1.4 * share[2] > 0


def test_neither_drifts_nor_trials_replace_one_elastic_division_by_another():
    measured = complete(*PROFILES[0])
    limits = Limits(WORKERS + 4, 4, WORKERS)
    found = partition(measured, REGISTRY, BATCHES, limits)
    assert found.division.elastic
    adapter = Adapter(measured, found.division, REGISTRY, limits, BATCHES)
    expected = adapter.expected(adapter.times)
    slower = {"batching_cpu": 1.7 * expected["batching_cpu"]}
    change = adapter.observe({**expected, **slower})
    assert change is None or not change.division.elastic
    rivals = contenders(found, elastic(0.75), 1.0, BATCHES)
    assert [one for one in rivals if one.elastic] == [elastic(0.75)]


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_an_epoch_that_follows_another_is_shorter_than_a_first_one(profile):
    """Its first batches were begun while the one before ended. What is begun of the next is paid for."""
    measured = complete(*profile)
    division = elastic(0.4)
    found = simulate(division, measured, BATCHES, REGISTRY)
    without = simulate(replace(division, elastic=False), measured, BATCHES, REGISTRY)  # the first ``lead`` the device's
    assert found.seconds < without.seconds
    assert violations(found, REGISTRY) == []
    assert max(found.utilisation().values()) <= 1.0 + 1e-9
    carried = BATCHES - len({one.batch for one in found.activities if one.key.startswith("batching")})
    assert 0 < carried <= division.host_buffer
