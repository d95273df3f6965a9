"""Phases that take longer or less than simulated are noted once, noise is not."""

from __future__ import annotations

from tests.planner.division.cases import REGISTRY, times
from weft.core.division import Division, PhaseTime
from weft.planner.division.drift import PhaseDrift

WHOLE = {"batching_gpu": PhaseTime(0.5), "transfer_gpu": PhaseTime(2.0), "training_gpu": PhaseTime(1.0)}


def drift(division: Division = Division(1, 1, 4, 8, 4)) -> PhaseDrift:  # noqa: B008
    return PhaseDrift(division, times(host=8, captured=WHOLE), 60, REGISTRY)


def test_as_expected_nothing_is_said():
    mine = drift()
    assert {"batching_cpu", "transfer_pcie", "training_gpu", "step_gpu"} <= set(mine.expected)
    for noise in (1.0, 1.2, 0.85, 1.3, 1.0, 0.75):  # never off twice in a row
        assert mine.observe({key: noise * seconds for key, seconds in mine.expected.items()}) == []


def test_a_strong_drift_is_noted_at_once_and_not_again():
    mine = drift()
    slower = {**mine.expected, "batching_cpu": 2.0 * mine.expected["batching_cpu"]}
    assert mine.observe(slower) == ["batching_cpu takes 2 times as long as predicted"]
    assert mine.observe(slower) == []
    assert mine.observe({"batching_cpu": slower["batching_cpu"] / 4})[0].startswith("batching_cpu takes 0.25 times")


def test_a_slight_drift_is_noted_when_it_lasts():
    mine = drift()
    slower = {"step_gpu": 1.3 * mine.expected["step_gpu"]}
    assert mine.observe(slower) == []
    assert len(mine.observe(slower)) == 1


def test_phases_that_were_not_simulated_say_nothing():
    assert drift(Division(0, 4)).observe({"batching_cpu": 5.0, "training_gpu": 1.0}) == []
