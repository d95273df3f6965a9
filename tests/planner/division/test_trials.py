"""Whole epochs are compared: what is slower than one side alone is left, what is faster than predicted is found."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.planner.division.cases import BESIDE, REGISTRY, times
from weft.core.division import Division, PhaseTime
from weft.planner.division import adapting as adapting_module
from weft.planner.division.adapting import APART, FORGET, MOST_TRIALS, RIVALS, Adapter, Trials, contenders
from weft.planner.division.partitioner import Limits, partition
from weft.planner.division.simulator import simulate

BATCHES = 100
LIMITS = Limits(16, 6, 4)
DEVICE, HOST = Division(0, 4), Division(1, 0, 4)
HALF, THIRD, MOST = Division(1, 1, 4), Division(2, 1, 4), Division(1, 4, 4)


def run(trials: Trials, present: Division, took, epochs: int) -> list[Division]:
    """The divisions of so many epochs; ``took``: seconds of an epoch by division."""
    used = []
    for epoch in range(epochs):
        used.append(present)
        found = trials.after(present, took(present, epoch))
        present = present if found is None else found[0]
    return used


def test_a_division_that_is_slower_than_one_side_is_predicted_to_be_is_left_after_two_epochs():
    trials = Trials({HALF: 1.0, DEVICE: 1.2, HOST: 4.0})
    used = run(trials, HALF, lambda one, _: 1.4 if one == HALF else 1.2, 8)
    assert used == [HALF, HALF] + [DEVICE] * 6


def test_as_predicted_nothing_that_is_slower_is_tried():
    trials = Trials({HALF: 1.0, THIRD: 1.15, DEVICE: 1.2})
    assert run(trials, HALF, lambda one, _: 1.0, 10) == [HALF] * 10


def test_about_as_fast_ones_are_tried_once_and_the_fastest_is_kept():
    trials = Trials({HALF: 1.0, THIRD: 1.05, DEVICE: 1.08, HOST: 3.0})
    took = {HALF: 1.0, THIRD: 0.9, DEVICE: 1.07}
    assert run(trials, HALF, lambda one, _: took[one], 7) == [HALF, THIRD] + [THIRD] * 5
    trials = Trials({HALF: 1.0, THIRD: 1.05, DEVICE: 1.08})
    took = {HALF: 1.0, THIRD: 1.04, DEVICE: 1.1}
    assert run(trials, HALF, lambda one, _: took[one], 7) == [HALF, THIRD, DEVICE] + [HALF] * 4


def test_a_first_epoch_in_which_steps_are_captured_is_not_believed():
    trials = Trials({HALF: 1.0, DEVICE: 1.2})
    assert run(trials, HALF, lambda one, epoch: 2.0 if epoch == 0 else 1.0, 6) == [HALF] * 6
    trials = Trials({HALF: 1.0, DEVICE: 1.2})
    slow = {HALF: 1.5, DEVICE: 1.2}
    used = run(trials, HALF, lambda one, epoch: 3.0 if epoch == 2 else slow[one], 8)
    assert used == [HALF, HALF] + [DEVICE] * 6


def test_a_trial_that_is_slower_by_far_is_over_after_one_epoch_unless_it_needs_more_steps_or_buffers():
    inside, alone = Division(2, 1, 4, 8, in_step=True), Division(1, 0, 4, 8)
    slow = lambda one, _: 1.0 if one == inside else 1.4  # noqa: E731
    assert run(Trials({inside: 1.0, alone: 1.05}), inside, slow, 5) == [inside, alone] + [inside] * 3
    more = Division(1, 0, 4, 12)
    assert run(Trials({inside: 1.0, more: 1.05}), inside, slow, 5) == [inside, more, more] + [inside] * 2
    beside = Division(2, 1, 4, 8, beside=True)
    slow = lambda one, _: 1.0 if one == beside else 1.4  # noqa: E731
    assert run(Trials({beside: 1.0, DEVICE: 1.05}), beside, slow, 5) == [beside, DEVICE, DEVICE] + [beside] * 2


def test_predictions_of_divided_ones_are_as_far_off_as_measured_ones():
    """Slower than predicted by a third, so another share is no way out, but the device is."""
    trials = Trials({HALF: 0.9, THIRD: 0.95, DEVICE: 1.1})
    used = run(trials, HALF, lambda one, _: {HALF: 1.2, DEVICE: 1.1, THIRD: 1.25}[one], 6)
    assert used[:3] == [HALF, HALF, DEVICE]
    assert used[-1] == DEVICE


def test_trials_of_what_is_not_predicted_to_be_faster_are_few():
    predicted = {Division(1, count, 4): 1.0 for count in range(1, 9)}
    trials = Trials(predicted)
    used = run(trials, HALF, lambda one, _: 1.0, 20)
    assert len(set(used)) == 1 + MOST_TRIALS


@pytest.mark.parametrize("seed", range(8))
def test_noise_does_not_make_it_flap(seed):
    chance = random.Random(seed)
    trials = Trials({HALF: 1.0, THIRD: 1.02, DEVICE: 1.2})
    used = run(trials, HALF, lambda one, _: chance.gauss({HALF: 1.0, THIRD: 1.0, DEVICE: 1.2}[one], 0.02), 60)
    assert sum(a != b for a, b in pairwise(used)) <= 4
    assert DEVICE not in used


def test_one_slow_epoch_of_a_known_division_is_not_the_end_of_it():
    trials = Trials({HALF: 1.0, DEVICE: 1.2})
    assert run(trials, HALF, lambda one, epoch: 1.9 if epoch == 3 else 1.0, 8) == [HALF] * 8


def test_contenders_are_the_sides_and_few_divisions_that_differ():
    measured = times(host=16, dma=1, sample=1, uva=2, train=1)
    found = partition(measured, REGISTRY, BATCHES, LIMITS)
    assert found.division.divided
    rivals = contenders(found, found.division, found.simulation.seconds, BATCHES)
    assert rivals[found.division] == found.simulation.seconds
    assert {one.kind for one in rivals} == {"dual buffer", "pipeline", "sequential"}
    divided = [one for one in rivals if one.divided and one != found.division]
    assert len(divided) <= RIVALS
    assert all(abs(one.device_share - found.division.device_share) >= APART for one in divided)
    assert list(rivals.values()) == pytest.approx(
        [simulate(one, measured, BATCHES, REGISTRY).seconds for one in rivals], rel=0.01
    )
    other = Division(1, 9, 4, 8, 6)
    assert found.division in contenders(found, other, 9.0, BATCHES)


def test_no_division_beside_training_is_tried_where_it_can_be_inside_of_steps():
    whole = {"batching_gpu": PhaseTime(0.5), "transfer_gpu": PhaseTime(2.0), "training_gpu": PhaseTime(1.0)}
    found = partition(times(host=24, dma=0.5, uva=2, captured=whole), BESIDE, BATCHES, Limits(16, 6, 8))
    assert any(one.beside and one.divided for one, _ in found.tried)
    rivals = contenders(found, DEVICE, 9.0, BATCHES)
    assert any(one.in_step for one in rivals)
    assert not any(one.beside and one.divided for one in rivals)


# ---- through the adapter -----------------------------------------------------------------------------


def adapted(took, epochs: int = 8, phases=lambda adapting: {}) -> tuple[Adapter, list[str]]:
    measured = times(host=16, dma=1, sample=1, uva=2, train=1)
    found = partition(measured, REGISTRY, BATCHES, LIMITS)
    adapting, told = Adapter(measured, found.division, REGISTRY, LIMITS, BATCHES, found), []
    for _ in range(epochs):
        seconds = took(adapting.division)
        change = adapting.observe({**phases(adapting), "epoch": seconds})
        told += adapting.told(seconds, change)
    return adapting, told


def seconds_of(division: Division) -> float:
    return simulate(division, times(host=16, dma=1, sample=1, uva=2, train=1), BATCHES, REGISTRY).seconds


def test_the_steady_state_is_never_slower_than_one_side_alone():
    """However wrong the simulator is about divided epochs while their phases are as expected."""
    best = min(seconds_of(Division(0, 6)), seconds_of(Division(1, 0, 4, 16, 6)))
    for wrong in (1.0, 1.2, 1.5, 2.0, 4.0):
        truth = lambda one, wrong=wrong: seconds_of(one) * (wrong if one.divided else 1.0)  # noqa: E731
        adapting, told = adapted(truth)
        assert truth(adapting.division) <= best / 0.97
        assert bool(told) == (not adapting.division.divided)


def test_the_journal_says_why_and_what_it_gained():
    _, told = adapted(lambda one: 9000.0 if one.divided else 300.0)
    assert told[0].startswith("divided anew, because an epoch takes 2.5 h, and so it is predicted to take")
    assert told[1] == "divided anew: an epoch took 5.0 min, before 2.5 h"
    assert len(told) == 2


def test_epochs_before_a_drift_are_not_compared_with_those_after():
    measured = times(host=16, dma=1, sample=1, uva=2, train=1)
    found = partition(measured, REGISTRY, BATCHES, LIMITS)
    adapting = Adapter(measured, found.division, REGISTRY, LIMITS, BATCHES, found)
    calm = adapting.expected(measured)
    assert adapting.observe({**calm, "epoch": found.simulation.seconds}) is None
    slow = {**adapting.expected(measured.scaled(batching_cpu=3.0))}
    change = adapting.observe({**slow, "epoch": 3 * found.simulation.seconds})
    assert change is not None
    assert "batching_cpu" in change.why
    again = adapting.expected(adapting.times)
    expected = simulate(adapting.division, adapting.times, BATCHES, REGISTRY).seconds
    for _ in range(6):
        adapting.observe({**again, "epoch": expected})
    assert adapting.division == change.division


def test_what_was_not_said_is_worked_out():
    measured = times(host=16, dma=1, sample=1, uva=2, train=1)
    division = partition(measured, REGISTRY, BATCHES, LIMITS).division
    adapting = Adapter(measured, division, REGISTRY, LIMITS, BATCHES)
    for _ in range(2):
        change = adapting.observe({"epoch": 10 * seconds_of(division)})
    assert change is not None
    assert not change.division.divided


def test_a_drift_does_not_lead_back_to_dividing_that_was_slower_than_predicted_before_a_while():
    measured = times(host=16, dma=1, sample=1, uva=2, train=1)
    found = partition(measured, REGISTRY, BATCHES, LIMITS)
    adapting = Adapter(measured, found.division, REGISTRY, LIMITS, BATCHES, found)
    for _ in range(2):
        change = adapting.observe({"epoch": 5 * found.simulation.seconds})
    assert not change.division.divided
    alone = change.after
    assert adapting.factors["dividing"] == pytest.approx(5.0)
    drifts = {key: 1.7 * seconds for key, seconds in adapting.expected(measured).items()}
    change = adapting.observe({**drifts, "epoch": 1.7 * alone})
    assert change.division.kind == "pipeline"  # the other side alone: the device is slow now
    said = []
    for _ in range(FORGET):
        calm = adapting.expected(adapting.times)
        change = adapting.observe({**calm, "epoch": simulate_alone(adapting)})
        said += [] if change is None else [change.why]
    assert adapting.division.divided
    assert any(f"dividing was slow {FORGET} epochs ago and is tried again" in one for one in said)


def simulate_alone(adapting: Adapter) -> float:
    return simulate(adapting.division, adapting.times, BATCHES, REGISTRY).seconds


def test_a_drift_that_changes_nothing_does_not_put_off_leaving_a_slow_division():
    measured = times(host=16, dma=1, sample=1, uva=2, train=1)
    found = partition(measured, REGISTRY, BATCHES, LIMITS)
    adapting = Adapter(measured, found.division, REGISTRY, LIMITS, BATCHES, found)
    slow = 5 * found.simulation.seconds
    assert adapting.observe({"epoch": slow}) is None
    drifted = {**adapting.expected(measured), "transfer_pcie": 1.7, "epoch": slow}
    change = adapting.observe(drifted)
    assert "transfer_pcie" in adapting.factors
    assert change is not None
    assert not change.division.divided


def test_trials_are_few_however_often_phases_drift(monkeypatch):
    """A drift begins others, with the divisions that are near by then."""
    near = {Division(1, count, 4): 1.0 for count in range(1, 12)}
    monkeypatch.setattr(adapting_module, "contenders", lambda found, present, *_: {**near, present: 1.0})
    measured = times(host=16, dma=1, sample=1, uva=2, train=1)
    adapting = Adapter(measured, HALF, REGISTRY, LIMITS, BATCHES, partition(measured, REGISTRY, BATCHES, LIMITS))
    used = []
    for epoch in range(20):
        if epoch % 3 == 0:
            adapting._trials = None
        adapting.observe({"epoch": 1.0})
        used.append(adapting.division)
    assert sum(a != b for a, b in pairwise([HALF, *used])) == MOST_TRIALS
