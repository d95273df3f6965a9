"""Plans with divisions, the ways that were not taken, and charts of schedules."""

from __future__ import annotations

import time
import xml.dom.minidom

import pytest

import weft
from weft.core.division import Division
from weft.core.errors import SpecError
from weft.core.plan import Plan
from weft.core.units import parse_bytes
from weft.engine.charts import check_picture, write_schedules
from weft.engine.estimator import Estimator
from weft.engine.plan import explained, explanation, schedules


@pytest.fixture(scope="module")
def report():
    task = weft.Task(
        graph="shape:reddit", model="sage", layers=2, hidden=64, mode="sampled", fanout=[10, 5], batch=1024, epochs=3
    )
    return weft.plan(task, machine="h200", budget="6GiB", placement=weft.Placement(features="host"))


def test_a_plan_with_host_features_has_a_division_and_says_so(report):
    (plan,) = report.plans
    assert isinstance(plan.division, Division)
    assert plan.division.host_batches
    assert any(reason.startswith("batches: ") for reason in plan.why)
    assert report.fits
    assert Plan.from_dict(plan.to_dict()).division == plan.division


def test_phases_are_those_of_the_division():
    """They were those of the placement that was planned before it."""
    about = {"layers": 3, "hidden": 256, "mode": "sampled", "fanout": [15, 10, 5], "batch": 1024, "epochs": 3}
    task = weft.Task(graph="shape:ogbn-papers100M", model="sage", **about)
    (group,) = weft.plan(task, machine="h200", budget="40GiB").groups
    assert group.plan.division is not None
    assert sum(group.cost.phases.values()) == pytest.approx(group.cost.epoch_seconds)


def test_the_runners_up_are_listed(report):
    told = explanation(report)
    assert "ways to train, the fastest first" in told
    assert told.count("per epoch and task") >= 3


def test_the_schedule_is_drawn(report, tmp_path):
    found = schedules(report)
    (simulation,) = found.values()
    assert simulation.seconds > 0
    for name in ("chart.svg", "chart.html"):
        write_schedules(found, tmp_path / name)
    drawn = xml.dom.minidom.parse(str(tmp_path / "chart.svg"))
    assert len(drawn.getElementsByTagName("rect")) > 20
    assert "<svg" in (tmp_path / "chart.html").read_text()


def test_mistakes_are_named(tmp_path):
    with pytest.raises(SpecError, match=r"must end in \.html or \.svg"):
        check_picture("--simulate", tmp_path / "chart.png")
    whole = weft.plan(weft.Task(graph="demo", model="gcn", mode="full"), machine="h200")
    with pytest.raises(SpecError, match="no group has batches that a host and a GPU prepare together"):
        schedules(whole)


SHAPES = [
    ("ogbn-products", "24GiB", {}), ("ogbn-products", "6GiB", {"mode": "sampled"}), ("ogbn-papers100M", "40GiB", {}),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "budget", "about"), SHAPES)
def test_large_shapes_are_searched_in_seconds(shape, budget, about):
    """0.6 to 1.7 seconds of an idle core; a busy machine's clock would say nothing."""
    task = weft.Task(f"shape:{shape}", model="sage", layers=3, hidden=256, **about)
    begin = time.process_time()
    report = weft.plan(task, machine="h200", budget=budget)
    found = explained(report)["group 1"]
    assert time.process_time() - begin < 16
    assert found.taken.device_bytes <= parse_bytes(budget)
    assert report.plans[0].mode == ("full" if shape == "ogbn-products" and not about else "sampled")
    assert len(found.others) >= 5
    assert not found.taken.rough
    assert (
        len({way.placement.cache_bytes for way in (found.taken, *found.others)}) > 1 or report.plans[0].mode == "full"
    )


@pytest.mark.parametrize(("model", "hidden"), [("sage", 256), ("gat", 64), ("gcn", 64)])
def test_a_small_budget_is_left_to_batches_of_the_host_rather_than_to_a_cache(model, hidden):
    """Things that lie elsewhere are evaluated in chunks as small, or the ways that leave room would not fit."""
    about = {"layers": 3, "hidden": hidden, "mode": "sampled", "fanout": [15, 10, 5], "batch": 1024, "eval_every": 1000}
    task = weft.Task(graph="shape:ogbn-papers100M?scale=0.5", model=model, epochs=1000, **about)
    report = weft.plan(task, machine="h200", budget="12GiB")
    (group,) = report.groups
    assert group.plan.division is not None
    assert group.cost.total_bytes <= parse_bytes("12GiB")
    fitting = [way for way in explained(report)["group 1"].others if way.device_bytes <= parse_bytes("12GiB")]
    free = [way for way in fitting if way.division is None and not way.condition]
    assert all(group.cost.epoch_seconds < 0.5 * way.seconds for way in free)


@pytest.mark.parametrize(
    ("division", "words"), [("fixed", "of every "), (0.25, "of every "), (None, "as many batches")]
)
def test_the_strategy_of_a_division_can_be_set(division, words):
    task = weft.Task(
        "shape:ogbn-products", model="sage", layers=3, hidden=256, mode="sampled", fanout=[15, 10, 5], batch=1024
    )
    placement = weft.Placement(features="host", topology="host", division=division)
    (plan,) = weft.plan(task, machine="h200", placement=placement).plans
    assert words in plan.division.words()
    assert Plan.from_dict(plan.to_dict()).division == plan.division
    if isinstance(division, float):
        assert plan.division.device_share == pytest.approx(division, abs=0.03)


@pytest.mark.parametrize("division", ["both", 1.5, -0.1, True, [1]])
def test_a_division_that_means_nothing_is_refused(division):
    with pytest.raises(SpecError, match=r"division=.* must be 'elastic' or 'fixed', or the share"):
        weft.Placement(division=division)


def test_several_tasks_share_batches_as_far_as_they_fit():
    tasks = [
        weft.Task("shape:ogbn-products", model="sage", layers=3, hidden=256, mode="sampled", lr=lr, name=f"{lr}")
        for lr in (0.1, 0.2, 0.3, 0.4)
    ]
    few, all_of_them = (weft.plan(tasks, machine="h200", budget=budget) for budget in ("12GiB", "100GiB"))
    assert [plan.members for plan in few.plans] == [("0.1", "0.2"), ("0.3", "0.4")]
    (plan,) = all_of_them.plans
    assert plan.members == ("0.1", "0.2", "0.3", "0.4")
    assert plan.join == "stacked"


def test_few_placements_get_a_dry_run_and_the_plan_is_the_one_taken(monkeypatch):
    about = {"layers": 3, "hidden": 256, "mode": "sampled", "fanout": [15, 10, 5], "batch": 1024, "epochs": 10}
    task = weft.Task(graph="shape:ogbn-products", model="gat", **about)
    report = weft.plan(task, machine="h200", budget="3GiB", placement=weft.Placement(features="host"))
    runs, plain = [], Estimator.alone
    monkeypatch.setattr(Estimator, "alone", lambda self, *given: runs.append(given) or plain(self, *given))
    taken = explained(report)["group 1"].taken
    placements = {given[1] for given in runs if len(given) > 1 and given[0].sampled and given[0].precision == "fp32"}
    assert len(placements) <= 6  # of dozens: where the plan lies, those tried before it, and at most three contenders
    assert (taken.placement, taken.device_bytes) == (report.plans[0].places, report.groups[0].cost.total_bytes)
