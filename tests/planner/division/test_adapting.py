"""Drift is adapted to within two epochs, noise is not, and the journal says what a change gained."""

from __future__ import annotations

import random

import pytest

from tests.planner.division.cases import BESIDE, REGISTRY, times
from weft.core.division import EPOCH, Division, PhaseTime
from weft.planner.division import adapting as adapting_module
from weft.planner.division.adapting import DRIFT, FORGET, Adapter
from weft.planner.division.partitioner import Limits, partition
from weft.planner.division.simulator import simulate

BATCHES = 100
LIMITS = Limits(16, 6, 4)


def adapter(**seconds) -> Adapter:
    measured = times(**{"host": 16, "dma": 1, "sample": 1, "uva": 2, "train": 1, **seconds})
    found = partition(measured, REGISTRY, BATCHES, LIMITS)
    return Adapter(measured, found.division, REGISTRY, LIMITS, BATCHES)


def measured_epoch(adapting: Adapter, noise: float = 0.0, seed: int = 0, **factors: float) -> dict[str, float]:
    """Mean seconds by phase of an epoch in which some phases take longer than profiled."""
    found = simulate(adapting.division, adapting.profiled.scaled(**factors), BATCHES, REGISTRY)
    spent: dict[str, list[float]] = {}
    for one in found.activities:
        spent.setdefault(one.key, []).append(one.end - one.begin)
    chance = random.Random(seed)
    return {key: chance.gauss(1, noise) * sum(some) / len(some) for key, some in spent.items()}


def test_a_slow_host_is_adapted_to_after_one_epoch():
    adapting = adapter()
    before = adapting.division.device_share
    change = adapting.observe(measured_epoch(adapting, batching_cpu=3.0))
    assert change is not None
    assert change.division.device_share > before
    assert change.after < 0.95 * change.before
    assert "batching_cpu takes 3 times as long" in change.why


def test_a_drift_does_not_lead_away_from_a_division_that_is_faster_than_the_new_one_would_be():
    """Copies that wait for others take long and are in time: the epoch says so."""
    for times_as_long, changes in ((0.5, False), (3.0, True)):
        adapting = adapter()
        epoch = times_as_long * simulate(adapting.division, adapting.profiled, BATCHES, REGISTRY).seconds
        change = adapting.observe({**measured_epoch(adapting, batching_cpu=3.0), EPOCH: epoch})
        assert (change is not None and "batching_cpu takes 3 times as long" in change.why) == changes


def test_a_weak_drift_needs_two_epochs():
    adapting = adapter()
    assert adapting.observe(measured_epoch(adapting, batching_cpu=1.5)) is None
    assert adapting.observe(measured_epoch(adapting, batching_cpu=1.5)) is not None


def test_the_new_division_is_near_the_best_for_the_new_times():
    adapting = adapter()
    for _ in range(2):
        adapting.observe(measured_epoch(adapting, batching_cpu=3.0))
    true = adapting.profiled.scaled(batching_cpu=3.0)
    best = partition(true, REGISTRY, BATCHES, LIMITS).simulation.seconds
    assert simulate(adapting.division, true, BATCHES, REGISTRY).seconds <= 1.05 * best


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("faster", [0.3, 3.0])
def test_dividing_anew_keeps_to_the_workers_that_it_was_begun_with(workers, faster):
    """Also where the machine has more, such as in a plan for fewer."""
    measured = times(host=16, dma=1, sample=1, uva=2, train=1)
    few = partition(measured, REGISTRY, BATCHES, LIMITS, workers=workers)
    adapting = Adapter(measured, few.division, REGISTRY, LIMITS, BATCHES)
    assert few.division.workers == workers
    for _ in range(4):
        change = adapting.observe(measured_epoch(adapting, batching_cpu=faster))
        assert change is None or not change.division.host_batches or change.division.workers == workers
    assert adapting.limits.workers == workers
    assert all(one.workers <= workers for one, _ in adapting.found.tried)


@pytest.mark.parametrize("seed", range(10))
def test_noise_changes_nothing(seed):
    adapting = adapter()
    before = adapting.division
    for epoch in range(40):
        assert adapting.observe(measured_epoch(adapting, 0.08, seed=100 * seed + epoch)) is None
    assert adapting.division == before


@pytest.mark.parametrize("seed", range(5))
def test_a_drift_with_noise_changes_once_and_does_not_flap(seed):
    adapting, changes = adapter(), 0
    for epoch in range(30):
        drift = {"batching_cpu": 3.0} if epoch >= 5 else {}
        changes += adapting.observe(measured_epoch(adapting, 0.08, seed=100 * seed + epoch, **drift)) is not None
    assert 1 <= changes <= 2


def test_what_recovers_is_divided_as_before():
    adapting = adapter()
    before = adapting.division.device_share
    adapting.observe(measured_epoch(adapting, batching_cpu=3.0))
    moved = adapting.division.device_share
    for _ in range(4):
        adapting.observe(measured_epoch(adapting))
    assert adapting.division.device_share < moved
    assert adapting.division.device_share == pytest.approx(before, abs=0.1)


def test_a_side_that_is_no_longer_used_is_tried_again_after_a_while():
    """Where the device then prepares all batches in captured steps, nothing at all is measured."""
    adapting = adapter()
    before = adapting.division
    assert adapting.observe(measured_epoch(adapting, batching_cpu=100.0)).division.host_batches == 0
    for waited in (FORGET, 2 * FORGET):  # the second time it takes twice as long
        for _ in range(waited - 1):
            assert adapting.observe({}) is None
        again = adapting.observe({})
        assert again.division == before
        assert f"batching_cpu was slow {waited} epochs ago and is tried again" in again.why
        assert adapting.observe(measured_epoch(adapting, batching_cpu=100.0)).division.host_batches == 0


def test_epochs_as_predicted_are_simulated_once(monkeypatch):
    adapting, runs = adapter(), []
    seconds = measured_epoch(adapting)
    plain = adapting_module.simulate
    monkeypatch.setattr(adapting_module, "simulate", lambda *given: runs.append(given) or plain(*given))
    for _ in range(5):
        assert adapting.observe(seconds) is None
        assert adapting.observe({}) is None
    assert len(runs) == 1
    adapting.observe(measured_epoch(adapting, batching_cpu=3.0))
    assert len(runs) > 1


def test_a_drift_that_gains_nothing_changes_nothing():
    adapting = adapter(host=0.4, train=20)  # training dominates: the host prepares everything in time
    assert adapting.division.kind == "pipeline"
    assert adapting.observe(measured_epoch(adapting, batching_cpu=2.0)) is None
    assert adapting.factors["batching_cpu"] > DRIFT


def test_a_host_that_is_faster_than_predicted_is_not_predicted_to_be_faster_still_by_itself():
    """Profiled too slow, and slower still beside reads: what is faster beside them is not so without them."""
    whole = {"batching_gpu": PhaseTime(0.5), "transfer_gpu": PhaseTime(2.0), "training_gpu": PhaseTime(1.0)}
    profiled, true = (
        times(host=host, dma=0.2, sample=1, uva=2, train=0.1, captured=whole, interference=beside, workers=8)
        for host, beside in ((60.0, {"batching_cpu": {"transfer_gpu": 1.6}}), (24.0, {}))
    )
    division = Division(1, 2, 8, 12, 6, True, in_step=True)
    adapting = Adapter(profiled, division, BESIDE, Limits(16, 6, 8), BATCHES)
    assert adapting.observe({"batching_cpu": adapting.expected(true)["batching_cpu"]}) is not None
    alone = Division(1, 0, 8, 16, 6, beside=True)
    predicted, found = (simulate(alone, one, BATCHES, BESIDE).seconds for one in (adapting.times, true))
    assert predicted == pytest.approx(found, rel=0.05)
    here = simulate(adapting.division, adapting.times, BATCHES, BESIDE).seconds
    assert here == pytest.approx(simulate(adapting.division, true, BATCHES, BESIDE).seconds, rel=0.1)


def test_a_host_that_is_slowed_down_less_than_predicted_keeps_its_own_pace():
    beside = {"batching_cpu": {"training_gpu": 3.0, "transfer_gpu": 3.0, "batching_gpu": 3.0}}
    adapting = adapter(interference=beside)
    calm = times(host=16, dma=1, sample=1, uva=2, train=1)
    own = measured_epoch(Adapter(calm, adapting.division, REGISTRY, LIMITS, BATCHES))["batching_cpu"]
    adapting.observe({"batching_cpu": 1.2 * own})
    assert adapting.factors["batching_cpu"] == pytest.approx(1.0)
    assert adapting.times.of("batching_cpu").mean == pytest.approx(16.0)
    assert 1.0 < adapting.times.interference["batching_cpu"]["training_gpu"] < 2.0


def test_the_journal_says_what_changed_and_what_it_gained():
    adapting = adapter()
    change = adapting.observe(measured_epoch(adapting, batching_cpu=3.0))
    (said,) = adapting.told(900.0, change)
    assert said.startswith("divided anew, because batching_cpu")
    assert adapting.told(600.0, None) == ["divided anew: an epoch took 10.0 min, before 15.0 min"]
    assert adapting.told(600.0, None) == []


def test_a_colder_cache_shows_in_steps_that_read_their_batch():
    """Of such steps only the whole is measured; the host then gets more of the batches."""
    whole = {"batching_gpu": PhaseTime(0.5), "transfer_gpu": PhaseTime(2.0), "training_gpu": PhaseTime(1.0)}
    profiled = times(host=24, dma=0.2, sample=1, uva=2, train=1, captured=whole)
    division = Division(1, 2, 8, 12, 6, True, in_step=True)
    adapting = Adapter(profiled, division, BESIDE, Limits(16, 6, 8), BATCHES)
    normal, slow = (
        {key: value for key, value in adapting.expected(some).items() if key not in ("batching_gpu", "transfer_gpu")}
        for some in (profiled, profiled.scaled(transfer_gpu=4.0))
    )
    assert normal["step_gpu"] == pytest.approx(3.5)
    assert adapting.observe(normal) is None
    change = adapting.observe(slow)
    assert change is not None
    assert "transfer_gpu takes 4 times as long" in change.why
    assert change.division.device_share < division.device_share
    assert adapting.factors["transfer_gpu"] == pytest.approx(4.0)
