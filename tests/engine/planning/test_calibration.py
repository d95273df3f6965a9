"""Calibration: finds the factors that made the data, survives odd runs, and does not guess what it cannot know."""

from __future__ import annotations

import json
import math
import random

import pytest

from weft.engine.learning import MAX_OBSERVATIONS, fit, with_runs
from weft.planner.cost.calibration import Calibration, Observation

TRUTH = {"spmm": 1.6, "attention": 3.0, "matmul": 0.8, "pointwise": 1.2, "launch": 2.0}


def runs(count: int, seed: int = 0, noise: float = 0.0) -> list[Observation]:
    """Runs whose epochs mix the families in different shares, over four orders of magnitude."""
    chance = random.Random(seed)
    made = []
    for index in range(count):
        size = 10 ** chance.uniform(-4, 0)
        families = {name: size * chance.random() ** 3 for name in TRUTH}
        measured = sum(TRUTH[name] * value for name, value in families.items())
        made.append(Observation(families, measured * math.exp(chance.gauss(0, noise)), f"run {index}"))
    return made


def predicted(factors, one):
    return sum(factors.get(name, 1.0) * value for name, value in one.families.items())


def test_exact_runs_give_the_factors_back():
    factors = fit(runs(200))
    for name, value in TRUTH.items():
        assert factors[name] == pytest.approx(value, rel=0.05)


def test_noise_and_outliers_do_little_harm():
    made = runs(100, noise=0.05)
    made += [Observation(one.families, 50 * one.measured) for one in made[:8]]
    factors = fit(made)
    errors = sorted(abs(math.log(predicted(factors, one) / one.measured)) for one in runs(50, seed=9))
    assert errors[len(errors) // 2] < 0.1


def test_one_run_moves_all_families_alike():
    one = Observation({"spmm": 1.0, "matmul": 1.0}, measured=4.0)
    factors = fit([one])
    assert factors["spmm"] == pytest.approx(factors["matmul"])
    assert predicted(factors, one) == pytest.approx(4.0, rel=0.05)


def test_families_that_were_never_seen_stay_as_they_are():
    calibration = with_runs(Calibration(), [Observation({"spmm": 1.0}, 2.0)])
    assert calibration.factor("attention") == 1.0
    assert calibration.factor("spmm") == pytest.approx(2.0, rel=0.05)


def test_nothing_known_changes_nothing():
    assert fit([]) == {}
    assert not Calibration().observations
    assert with_runs(Calibration(), [Observation({}, 1.0), Observation({"spmm": 1.0}, math.nan)]) == Calibration()


def test_old_runs_are_forgotten():
    calibration = with_runs(Calibration(), runs(MAX_OBSERVATIONS + 10))
    assert len(calibration.observations) == MAX_OBSERVATIONS
    assert calibration.observations[-1].label == f"run {MAX_OBSERVATIONS + 9}"


def toys(count: int) -> list[Observation]:
    """Short epochs that took nine times as long as predicted: most of it is not the operators' own time."""
    families = {"spmm": 2e-5, "matmul": 3e-5, "pointwise": 2e-5, "launch": 3e-5}
    return [Observation(families, 9e-4, f"toy {index}") for index in range(count)]


LARGE = {"spmm": 0.2, "matmul": 0.1, "pointwise": 0.05, "launch": 0.001}


def test_toy_runs_do_not_correct_a_large_graph():
    calibration = with_runs(Calibration(), toys(400))
    total = sum(LARGE.values())
    assert predicted(calibration.factors, toys(1)[0]) == pytest.approx(9e-4, rel=0.1)
    own = calibration.for_epoch(total)
    assert predicted(own.factors, Observation(LARGE, 1.0)) == pytest.approx(total, rel=0.1)
    near = calibration.for_epoch(5e-4)
    assert near.factors == calibration.factors


def test_toy_runs_do_not_push_out_a_large_one():
    large = Observation(LARGE, 0.37, "large")
    calibration = with_runs(Calibration(), [large, *toys(MAX_OBSERVATIONS + 50)])
    assert len(calibration.observations) == MAX_OBSERVATIONS
    assert large in calibration.observations
    own = calibration.for_epoch(large.predicted)
    assert predicted(own.factors, large) == pytest.approx(0.37, rel=0.5)


def test_runs_of_one_length_count_like_a_few():
    few, many = ([*[Observation(LARGE, 0.37)] * 5, *toys(count)] for count in (10, 300))
    assert fit(many) == pytest.approx(fit(few), rel=1e-6)


def test_json_round_trip():
    calibration = with_runs(Calibration(), runs(5))
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration
