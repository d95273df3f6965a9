"""Factors of reads and copies come out of steps and copies that were beside each other."""

from __future__ import annotations

import pytest

from weft.core.division import MOST_SLOWER, PhaseTime, PhaseTimes, SharedBus

ALONE = SharedBus(step=8.0, reads=5.0, training=2.5, copy=4.5, training_slower=1.1, copy_slower=1.2)


def beside(reads: float, copies: float) -> tuple[float, float]:
    """A step and a copy beside each other, if reads and copies take so many times as long."""
    step = ALONE.step + ALONE.reads * (reads - 1) + ALONE.training * (ALONE.training_slower - 1)
    during = ALONE.reads * reads / step
    return step, ALONE.copy / (during / copies + (1 - during) / ALONE.copy_slower)


@pytest.mark.parametrize("reads", [1.0, 1.4, 1.9])
@pytest.mark.parametrize("copies", [1.0, 1.7, 5.0])
def test_factors_are_found_again(reads, copies):
    assert ALONE.factors(*beside(reads, copies)) == pytest.approx((reads, copies))


def test_copies_that_hardly_go_on_are_bounded_and_nothing_gets_faster():
    step, copy = beside(1.5, 5.0)
    assert ALONE.factors(step, 100 * copy)[1] == MOST_SLOWER
    assert ALONE.factors(0.9 * ALONE.step, 0.5 * ALONE.copy) == (1.0, 1.0)
    assert ALONE.factors(step, 0.0) == (1.0, 1.0)


def test_inside_of_steps_has_interference_of_its_own():
    phases = {key: PhaseTime(1.0) for key in ("transfer_pcie", "transfer_gpu", "training_gpu")}
    measured = {"transfer_pcie": {"transfer_gpu": 1.7, "training_gpu": 1.1}, "training_gpu": {"transfer_gpu": 4.0}}
    times = PhaseTimes(phases, measured, inside={"transfer_pcie": {"transfer_gpu": 5.0}})
    assert times.slowdown("transfer_pcie", ["transfer_gpu"]) == 1.7
    inside = times.in_step()
    assert inside.slowdown("transfer_pcie", ["transfer_gpu"]) == 5.0
    assert inside.slowdown("transfer_pcie", ["training_gpu"]) == 1.1
    assert inside.slowdown("training_gpu", ["transfer_gpu"]) == 4.0
    assert PhaseTimes.from_dict(times.to_dict()) == times
    assert "inside" not in PhaseTimes(phases).to_dict()
