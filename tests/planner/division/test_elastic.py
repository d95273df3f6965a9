"""Elastic divisions need no ratio: they are as fast as the best of all ratios, and follow a host that slows down."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.division.cases import times
from tests.planner.division.constraints import violations
from tests.planner.division.test_recorded_divided_epochs import BATCHES, REGISTRY, RUNS, WORKERS, complete
from weft.core.division import HOST, Division, PhaseTime, PhaseTimes
from weft.planner.division import simulator
from weft.planner.division.partitioner import Limits, best_share, overlap_for, partition
from weft.planner.division.simulator import bound, loads, simulate

PROFILES = [(run, one["shape"], one["model"]) for run, found in RUNS.items() for one in found["profiles"]]
LIMITS = Limits(WORKERS + 4, 4, WORKERS)
SECONDS = st.floats(0.05, 10.0)


def varied(measured: PhaseTimes) -> PhaseTimes:
    """Batches of the host vary by 15 %."""
    host = measured.of("batching_cpu")
    return replace(measured, phases={**measured.phases, "batching_cpu": PhaseTime(host.mean, 0.15 * host.mean)})


def elastic(share: float, workers: int = WORKERS) -> Division:
    limits = replace(LIMITS, workers=workers, host_buffer=workers + 4)
    return overlap_for(share, limits, lead=14)


def slower(measured: PhaseTimes, factor: float) -> PhaseTimes:
    """With a host that takes so many times as long."""
    host = measured.of("batching_cpu").scaled(factor)
    return replace(measured, phases={**measured.phases, "batching_cpu": host})


def seconds(division: Division, measured: PhaseTimes, seed: int | None = None) -> float:
    return simulate(division, measured, BATCHES, REGISTRY, seed).seconds


@pytest.mark.parametrize("profile", PROFILES, ids=str)
@pytest.mark.parametrize("workers", [14, 8])
def test_as_fast_as_the_best_of_all_ratios(profile, workers):
    measured = varied(complete(*profile))
    limits = replace(LIMITS, workers=workers, host_buffer=workers + 4)
    fixed = replace(limits, strategy="fixed")
    ratios = [overlap_for(step / 20, way, lead=14) for way in (fixed, limits) for step in range(2, 19)]
    best = min(seconds(one, measured, 1) for one in ratios)
    chosen = partition(measured, REGISTRY, BATCHES, Limits(workers + 4, 4, workers)).tried
    (found,) = (one for one, _ in chosen if one.elastic)
    assert seconds(found, measured, 1) <= 1.035 * best


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_a_ratio_that_is_far_off_costs_little(profile):
    """Fixed, three batches of the device's per one of the host's take up to a third longer than the best."""
    measured = complete(*profile)
    near, far = elastic(0.4), elastic(0.75)
    fixed_near, fixed_far = (replace(division, strategy="fixed") for division in (near, far))
    lost = seconds(far, measured) / seconds(near, measured)
    stays = seconds(fixed_far, measured) / seconds(fixed_near, measured)
    assert lost <= max(0.6 * (stays - 1.0), 0.03) + 1.0


@settings(max_examples=100, deadline=None)
@given(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), st.integers(1, 4), st.integers(1, 6), st.integers(1, 60))
def test_schedules_keep_to_the_constraints(five, workers, buffer, batches):
    division = Division(1, 1, workers, buffer, buffer, lead=3)
    found = simulate(division, times(*five), batches, REGISTRY)
    assert violations(found, REGISTRY) == []
    assert sum(one.key == "training_gpu" for one in found.activities) == batches
    assert max(found.utilisation().values()) <= 1.0 + 1e-9
    by_resource = loads(times(*five), REGISTRY, "gpu", workers, elastic=True)
    del by_resource[HOST]  # which has begun some batches of an epoch before it, and begins some of the next
    assert found.seconds >= batches * bound(by_resource, best_share(by_resource)) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), st.integers(1, 4), st.integers(1, 6), st.integers(1, 24))
def test_short_epochs_are_simulated_as_the_mean_of_many(five, workers, buffer, batches):
    """One alone may have had most of its batches begun by the one before it."""
    division = Division(1, 1, workers, buffer, buffer, lead=3)
    few = simulate(division, times(*five), batches, REGISTRY).seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "BEFORE", 512)
        many = simulate(division, times(*five), batches, REGISTRY).seconds
    assert few == pytest.approx(many, rel=0.15)


def test_a_slower_host_is_given_less_without_dividing_anew():
    profile = complete(*PROFILES[0])
    share = [
        sum(one.key == "batching_cpu" for one in simulate(elastic(0.4), measured, BATCHES, REGISTRY).activities)
        for measured in (profile, slower(profile, 1.5), slower(profile, 2.5))
    ]
    assert share[0] > 1.2 * share[1] > 1.4 * share[2] > 0


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_an_epoch_that_follows_another_has_begun_before_it(profile):
    """Its first batches were begun while the one before ended; what is begun of the next is paid for."""
    measured = complete(*profile)
    division = elastic(0.4)
    found = simulate(division, measured, BATCHES, REGISTRY)
    assert violations(found, REGISTRY) == []
    assert max(found.utilisation().values()) <= 1.0 + 1e-9
    carried = BATCHES - len({one.batch for one in found.activities if one.key.startswith("batching")})
    assert 0 < carried <= division.host_buffer
