"""Choosing for real tasks: executable plans with divisions, runners-up, and charts of schedules."""

from __future__ import annotations

import time
import xml.dom.minidom

import pytest
import torch

import weft
from weft.batches.sampled import source_for
from weft.core.division import Division
from weft.core.errors import SpecError
from weft.core.plan import Plan
from weft.core.units import parse_bytes
from weft.engine import choosing as setups
from weft.engine.charts import check_picture, write_schedules
from weft.engine.choosing import choose_for
from weft.engine.plan import explanation, schedules
from weft.graph.generate import citation
from weft.runtime.group import GroupRun


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
    chosen = choose_for(task, "h200", budget)
    assert time.process_time() - begin < 8
    best = chosen.choice.best
    assert best.device_bytes <= parse_bytes(budget)
    assert (chosen.cost.epoch_seconds, chosen.cost.total_bytes) == (pytest.approx(best.seconds), best.device_bytes)
    assert chosen.plan.mode == ("full" if shape == "ogbn-products" and not about else "sampled")
    assert len(chosen.choice.runners_up) >= 5
    assert not best.setup.rough
    ways = {one.setup.placement.cache_bytes for one in (best, *chosen.choice.runners_up)}
    assert len(ways) > 1 or chosen.plan.mode == "full"


@pytest.mark.parametrize(("model", "hidden"), [("sage", 256), ("gat", 64), ("gcn", 64)])
def test_a_small_budget_is_left_to_batches_of_the_host_rather_than_to_a_cache(model, hidden):
    """Things that lie elsewhere are evaluated in chunks as small, or the ways that leave room would not fit."""
    about = {"layers": 3, "hidden": hidden, "mode": "sampled", "fanout": [15, 10, 5], "batch": 1024, "eval_every": 1000}
    task = weft.Task(graph="shape:ogbn-papers100M?scale=0.5", model=model, epochs=1000, **about)
    (group,) = weft.plan(task, machine="h200", budget="12GiB").groups
    assert group.plan.division is not None
    assert group.cost.total_bytes <= parse_bytes("12GiB")
    chosen = choose_for(task, "h200", "12GiB")
    fitting = [one for one in chosen.choice.runners_up if one.device_bytes <= parse_bytes("12GiB")]
    assert chosen.choice.best.division is not None
    assert all(chosen.choice.best.seconds < 0.5 * one.seconds for one in fitting if one.division is None)


def test_several_tasks_share_batches_as_far_as_they_fit():
    tasks = [
        weft.Task("shape:ogbn-products", model="sage", layers=3, hidden=256, mode="sampled", lr=lr, name=f"{lr}")
        for lr in (0.1, 0.2, 0.3, 0.4)
    ]
    few, all_of_them = (choose_for(tasks, "h200", budget) for budget in ("12GiB", "100GiB"))
    assert few.plan.members == ("0.1", "0.2")
    assert all_of_them.plan.members == ("0.1", "0.2", "0.3", "0.4")
    assert all_of_them.plan.join == "stacked"
    alone = choose_for(tasks[0], "h200", "100GiB")
    assert all_of_them.choice.best.seconds_per_task < alone.choice.best.seconds_per_task


def test_what_is_chosen_can_be_run():
    graph = citation(300, 2000, 8, 3, seed=1)
    task = weft.Task(graph, model="sage", mode="sampled", fanout=[4, 3], batch=32, hidden=8, epochs=2)
    plan = choose_for(task, "cpu").plan
    run = GroupRun([task], graph, plan, torch.device("cpu"), make_source=source_for(task, plan))
    assert len(run.advance(2)[0].rows) == 2


def test_one_task_is_chosen_for_with_its_cost_and_reasons():
    task = weft.Task(graph="shape:reddit", model="sage", hidden=32, fanout=[10, 5], batch=512, mode="sampled")
    chosen = choose_for(task, "h200", "80GiB")
    assert chosen.plan.mode == "sampled"
    assert chosen.plan.placement.on_device
    assert chosen.cost.epoch_seconds > 0
    assert any("chosen of" in reason for reason in chosen.plan.why)
    assert chosen.choice.runners_up


def test_what_cannot_fit_gets_no_dry_run_and_the_choice_is_the_same(monkeypatch):
    about = {"layers": 3, "hidden": 256, "mode": "sampled", "fanout": [15, 10, 5], "batch": 1024, "epochs": 10}
    task = weft.Task(graph="shape:ogbn-products", model="gat", **about)
    runs, plain = [], setups.Setups._placed
    monkeypatch.setattr(setups.Setups, "_placed", lambda *given: runs.append(given) or plain(*given))
    chosen, few = choose_for(task, "h200", "3GiB"), len(runs)
    monkeypatch.setattr(setups, "TOO_LARGE", float("inf"))
    every = choose_for(task, "h200", "3GiB")
    assert few < (len(runs) - few) - 2
    assert chosen.plan.places == every.plan.places
    assert chosen.cost.total_bytes == every.cost.total_bytes
