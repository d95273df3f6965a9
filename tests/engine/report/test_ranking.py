"""Which settings won, by how much, and which of them mattered."""

from __future__ import annotations

import re
from statistics import stdev

import pytest

from tests.engine.sweeps import made
from weft.core.search_space import uniform
from weft.core.sweep import Sweep
from weft.engine.page import render_sweep_report
from weft.engine.ranking import effects, in_common, pruned_words, verdict, what_mattered

SWEEP = Sweep("cora", lr=[0.1, 0.2, 0.3], hidden=[16, 64], seed=range(4))


def test_seeds_are_averaged():
    result = made(SWEEP, lambda task: task.lr + task.seed / 100)
    ranked = result.settings_table()
    assert len(ranked) == 6
    assert ranked[0].name == "lr=0.3 hidden=16"
    assert ranked[0].mean == pytest.approx(0.315)
    assert ranked[0].error_of(ranked[0].deviation) == pytest.approx(0.00645, abs=1e-4)
    assert ranked[0].test_mean == pytest.approx(0.305)


def test_a_clear_lead_and_one_within_the_noise():
    clear = made(Sweep("cora", lr=[0.1, 0.2], seed=range(4)), lambda task: task.lr + task.seed / 1000)
    said = verdict(clear, clear.settings_table())
    assert "0.1000 ahead of lr=0.1, more than chance between 4 seeds explains" in said
    assert "on the same 30 nodes (a share of them has a standard error of 0.0732)" in said
    two = made(Sweep("cora", lr=[0.1, 0.2], seed=range(2)), lambda task: task.lr + task.seed * 0.05)
    assert "within the noise of 2 seeds" in verdict(two, two.settings_table()), (
        "2.8 standard errors are little with two seeds"
    )
    noisy = made(Sweep("cora", lr=[0.1, 0.2], seed=range(4)), lambda task: task.lr / 100 + task.seed / 10)
    said = verdict(noisy, noisy.settings_table())
    assert "within the noise of 4 seeds" in said
    assert "1 other setting is level" in said


def test_one_seed_says_what_is_not_known():
    result = made(Sweep("cora", lr=[0.1, 0.2]), lambda task: task.lr)
    assert "standard error of 0.0730" in verdict(result, result.settings_table()), "sqrt(0.2 * 0.8 / 30 nodes)"
    alone = made(Sweep("cora"), lambda task: 0.5)
    assert "nothing to compare" in verdict(alone, alone.settings_table())
    level = made(Sweep("cora", lr=[0.1, 0.2]), lambda task: 0.5)
    assert "Level with lr=0.2" in verdict(level, level.settings_table())


def test_settings_by_how_much_they_moved_the_score():
    found = effects(made(SWEEP, lambda task: task.lr + task.hidden / 1e4 + task.seed / 1e3))
    assert [effect.setting for effect in found] == ["lr", "hidden"], "and no seed"
    assert found[0].labels == ("0.1", "0.2", "0.3")
    assert found[0].span == pytest.approx(0.2)
    said = what_mattered(found)
    assert said[0].startswith("lr=0.3 was best on average, 0.2000 above the worst (0.1: ")
    assert said[1] == "the best lr is the largest that was tried: larger ones may be better still"
    assert said[2].startswith("hidden made no clear difference")


def test_many_numbers_are_compared_by_ranges():
    sweep = Sweep("cora", lr=uniform(0.1, 0.9), samples=40)
    (effect,) = effects(made(sweep, lambda task: task.lr))
    assert effect.binned
    assert len(effect.means) == 5
    assert list(effect.means) == sorted(effect.means)
    assert sum(map(len, effect.groups)) == 40


def test_what_the_best_have_in_common():
    sweep = Sweep("cora", model=["gcn", "sage"], lr=uniform(0.1, 0.9), dropout=uniform(0, 0.9), samples=40)
    said = in_common(made(sweep, lambda task: (task.model == "gcn") + task.lr))
    assert said.startswith("the best 8 have model=gcn, lr from 0.63")
    assert "dropout" not in said
    assert in_common(made(SWEEP, lambda task: task.lr)) == "", "too few to say"


def test_diverged_members_do_not_count():
    result = made(
        SWEEP, lambda task: task.lr, broken=[f"lr=0.3 hidden={h} seed={s}" for h in (16, 64) for s in range(4)]
    )
    assert result.settings_table()[0].name == "lr=0.2 hidden=16"
    assert effects(result)[0].labels == ("0.1", "0.2")


def test_pruned_members_do_not_count_and_are_said():
    result = made(SWEEP, lambda task: 0.8 if task.lr < 0.3 else 0.3)
    for member in result.tasks:  # pruned early: their scores are those of an early epoch
        if member.task.lr == 0.3 or member.task.seed > 1:
            member.status, member.metrics["val_accuracy"] = "pruned", 0.2
    (lr, hidden) = sorted(effects(result), key=lambda effect: len(effect.setting))
    assert (lr.labels, lr.means) == (("0.1", "0.2"), (0.8, 0.8))
    assert hidden.means == (0.8, 0.8)
    assert pruned_words(result) == "16 of 24 trainings were pruned and do not count here: all with lr=0.3"
    page = render_sweep_report(result)
    assert "<li>16 of 24 trainings were pruned and do not count here: all with lr=0.3</li>" in page
    for member in result.tasks:
        member.status = "pruned"
    assert "all 24 trainings were pruned" in pruned_words(result)
    assert len(effects(result)[0].labels) == 3
    assert pruned_words(made(SWEEP, lambda task: 0.5)) == ""


def test_plus_minus_is_the_standard_deviation_wherever_it_is_shown():
    result = made(Sweep("cora", lr=[0.1, 0.2], seed=range(4)), lambda task: task.lr + task.seed / 100)
    deviation = stdev(seed / 100 for seed in range(4))
    page = render_sweep_report(result)
    shown = {float(value) for value in re.findall(r"± (\d\.\d+)", page)}
    assert shown == {round(deviation, 3), round(deviation, 4)}
    assert "mean ± standard deviation over 4 seeds" in page
    assert f"standard deviation {deviation:.4f}" in page, "the bar of a chart"
    best = f"lr=0.2 (val accuracy 0.215 ± {deviation:.3f}, test 0.205 ± {deviation:.3f}; "
    assert str(result.best_settings()) == best + "mean ± standard deviation over 4 seeds)"
