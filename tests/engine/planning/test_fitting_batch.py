"""``batch="fit"``: the largest batch whose predicted bound fits, decided by the plan and trained exactly."""

from __future__ import annotations

import json

import pytest

import weft
from weft.core.errors import SpecError

QUIET = {"progress": False, "device": "cpu"}
ARXIV = {"graph": "shape:ogbn-arxiv", "model": "sage", "hidden": 256, "fanout": [15, 10]}
DEMO = {"graph": "demo", "model": "sage", "hidden": 8, "epochs": 3, "fanout": [4, 3]}


def planned(budget, **settings):
    return weft.plan(weft.Task(**{**ARXIV, **settings}), machine="h200", budget=budget)


def test_the_largest_power_of_two_that_fits_is_planned_and_the_next_one_does_not_fit():
    report = planned("2GiB", batch="fit")
    plan = report.groups[0].plan
    assert report.fits
    assert plan.batch & (plan.batch - 1) == 0
    assert any(f"batch='fit': {plan.batch:,} is the largest power of two" in why for why in plan.why)
    same = planned("2GiB", batch=plan.batch).groups[0]
    assert same.cost.total_bytes == report.peak_bytes
    assert same.plan.batch == plan.batch
    larger = planned("2GiB", batch=2 * plan.batch)
    lies = same.plan.placement.features
    assert not larger.fits or larger.groups[0].plan.placement.features != lies


@pytest.mark.rest
def test_less_memory_gives_a_smaller_batch_and_all_memory_at_most_the_training_nodes():
    sizes = [planned(budget, batch="fit").groups[0].plan.batch for budget in ("1.2GiB", "2GiB", None)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 1024 < sizes[2] <= 90_941


def test_what_fits_nowhere_is_refused_as_ever():
    report = planned("790MiB", batch="fit", layers=1, fanout=[5])
    assert not report.fits
    assert report.groups[0].plan.batch == 1
    assert not any("batch='fit'" in why for why in report.groups[0].plan.why)


def test_it_trains_with_that_number_and_says_so(tmp_path):
    fitted = weft.run(weft.Task(**DEMO, batch="fit"), out=tmp_path / "out", **QUIET)
    number = fitted.plan.batch
    train = weft.load("demo").train.numel()
    assert train / 2 < number <= train  # all of this graph fits
    assert fitted.task.batch == number
    assert json.loads((tmp_path / "out" / "result.json").read_text())["task"]["batch"] == number
    assert any("batch='fit'" in why for why in fitted.plan.why)
    plain = weft.run(weft.Task(**DEMO, batch=number), **QUIET)
    assert plain.history["loss"] == fitted.history["loss"]


def test_a_plan_that_was_written_down_trains_with_the_number_that_it_decided(tmp_path):
    report = weft.plan(weft.Task(**DEMO, batch="fit"), machine="cpu")
    file = tmp_path / "plan.json"
    file.write_text(report.to_json())
    result = weft.run(weft.read(file), **QUIET)
    assert result.task.batch == report.groups[0].plan.batch


def test_a_resumed_run_keeps_its_number(tmp_path):
    first = weft.run(weft.Task(**DEMO, batch="fit"), out=tmp_path / "out", **QUIET)
    again = weft.run(weft.Task(**DEMO, batch="fit"), out=tmp_path / "out", resume=True, budget="20GiB", **QUIET)
    assert again.task.batch == first.task.batch
    assert again.history["loss"] == first.history["loss"]
    longer = weft.Task(**{**DEMO, "epochs": 5}, batch="fit")
    assert weft.run(longer, out=tmp_path / "out", extend=True, **QUIET).task.batch == first.task.batch


def test_members_of_a_sweep_have_their_own(tmp_path):
    result = weft.run(weft.Sweep(**{**DEMO, "hidden": [4, 8]}, batch="fit"), out=tmp_path / "out", **QUIET)
    assert {member.task.batch for member in result} == {member.plan.batch for member in result}
    again = weft.run(weft.Sweep(**{**DEMO, "hidden": [4, 8]}, batch="fit"), out=tmp_path / "out", resume=True, **QUIET)
    assert [m.history["loss"] for m in again] == [m.history["loss"] for m in result]


@pytest.mark.parametrize(
    ("settings", "options", "told"),
    [
        ({"batch": "fit"}, {"ranks": 2}, "batch='fit' is decided for one device"),
        ({"batch": "fits"}, {}, "batch='fits' must be a whole number"),
        ({"batch": "fit", "mode": "full"}, {}, "mode='full' trains on the whole graph"),
    ],
)
def test_mistakes(settings, options, told):
    with pytest.raises(SpecError, match=told):
        weft.run(weft.Task(**{**DEMO, "fanout": None, **settings}), **QUIET, **options)


def test_toml_takes_the_word(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text('graph = "demo"\n[model]\nname = "sage"\nhidden = 8\n[train]\nbatch = "fit"\nfanout = [4, 3]\n')
    assert weft.read(spec).batch == "fit"
    assert weft.plan(weft.read(spec), machine="cpu").groups[0].plan.batch > 1
