"""Scores of settings over seeds, in tables, words and notebooks."""

from __future__ import annotations

from statistics import fmean, stdev

import pytest
import torch

import weft
from weft.core.errors import SpecError
from weft.core.member import short
from weft.core.plan import Plan
from weft.core.sweep import Sweep
from weft.engine.result import Result
from weft.engine.sweep_result import SweepResult


def made(scores, **settings):
    """A sweep with these validation accuracies, in the order of its tasks; None: no score, negative: pruned."""
    sweep = Sweep(settings.pop("graph", "demo"), **settings)
    tasks = []
    for task, score in zip(sweep.tasks(), scores, strict=True):
        found = {} if score is None else {"val_accuracy": abs(score), "test_accuracy": abs(score) - 0.1}
        metrics = {"metric": "accuracy", "best_epoch": 3, "epochs_run": 5, "seconds": 1.0, **found}
        status = "pruned" if score is not None and score < 0 else "finished"
        tasks.append(Result(task, Plan((task.label,)), metrics, {"val_accuracy": [0.5]}, None, {}, status))
    return SweepResult(sweep, tasks, (), {}, 3.0)


def test_the_best_settings_are_those_with_the_best_mean_not_the_luckiest_run():
    result = made([0.9, 0.5, 0.8, 0.78], hidden=[8, 16], seed=[0, 1])
    assert result.best().name == "hidden=8 seed=0"
    best = result.best_settings()
    assert (best.name, best.settings) == ("hidden=16", {"hidden": 16})
    assert best.members == ("hidden=16 seed=0", "hidden=16 seed=1")
    assert best.mean == pytest.approx(fmean([0.8, 0.78]))
    assert best.deviation == pytest.approx(stdev([0.8, 0.78]))
    assert best.test_mean == pytest.approx(0.69)
    assert (
        str(best)
        == "hidden=16 (val accuracy 0.790 ± 0.014, test 0.690 ± 0.014; mean ± standard deviation over 2 seeds)"
    )
    table = result.settings_table()
    assert [one.name for one in table] == ["hidden=16", "hidden=8"]
    assert table[1].to_dict()["val_accuracy_mean"] == pytest.approx(0.7)


def test_settings_that_differ_in_nothing_but_seeds_are_called_by_the_model():
    best = made([0.8, 0.78], model="gat", seed=[0, 1]).best_settings()
    assert str(best) == "gat (val accuracy 0.790 ± 0.014, test 0.690 ± 0.014; mean ± standard deviation over 2 seeds)"
    assert [one.name for one in made([0.8, 0.78], model="gat", seed=[0, 1]).settings_table()] == ["gat"]


def test_pruned_runs_count_apart_unless_all_were():
    result = made([-0.2, 0.8, -0.6, -0.5], hidden=[8, 16], seed=[0, 1])
    first, second = result.settings_table()
    assert (first.name, first.mean, first.deviation, first.pruned) == ("hidden=8", 0.8, None, 1)
    assert (second.pruned, len(second.members)) == (2, 2)


def test_a_metric_that_nobody_has_is_an_error():
    with pytest.raises(SpecError, match="has the metric 'val_accuracy'"):
        made([None, None], hidden=[8, 16]).best_settings()


def test_losses_are_better_when_lower():
    result = made([0.9, 0.8], hidden=[8, 16])
    for member, loss in zip(result.tasks, (2.0, 1.0), strict=True):
        member.metrics["val_loss"] = loss
    assert result.best_settings("val_loss").name == "hidden=16"


def test_graphs_are_not_mixed():
    result = made([0.9, 0.8], graph=["demo", "shape:cora"])
    with pytest.raises(SpecError, match="whose scores do not compare"):
        result.best_settings()
    assert result.best_settings(graph="shape:cora").mean == 0.8


def test_numbers_are_as_short_as_they_were_measured():
    value = torch.tensor(0.856).item()
    assert value != 0.856
    assert short(value) == 0.856
    assert short(float("inf")) == float("inf")
    result = weft.run(weft.Task(graph="demo", hidden=8, epochs=3), device="cpu", progress=False)
    for split in ("train", "val", "test"):
        assert len(repr(result.metrics[f"{split}_accuracy"])) <= 12
    assert repr(result).startswith("<Result 'gcn': finished, val accuracy 0.")


def test_notebooks_show_tables():
    page = made([0.9, 0.5, 0.8, 0.78], hidden=[8, 16], seed=[0, 1])._repr_html_()
    assert "<td>hidden=16</td><td>0.790 ± 0.014</td>" in page
    result = weft.run(weft.Task(graph="demo", hidden=8, epochs=3, name="<one>"), device="cpu", progress=False)
    assert "<b>&lt;one&gt;</b>: finished" in result._repr_html_()
    assert "<td>val</td>" in result._repr_html_()
    plan = weft.plan(weft.Task(graph="shape:cora"), machine="h200")
    assert "fits</p>" in plan._repr_html_()
    assert "<pre>" in plan._repr_html_()
