"""Choosing for real tasks: executable plans with divisions, runners-up, and charts of schedules."""

from __future__ import annotations

import xml.dom.minidom

import pytest

import weft
from weft.core.division import Division
from weft.core.errors import SpecError
from weft.core.plan import Plan
from weft.engine.planning.choosing import choose_for
from weft.engine.planning.explaining import explanation, schedules
from weft.engine.report.schedule_chart import check_simulate, write_schedules


@pytest.fixture(scope="module")
def report():
    task = weft.Task(
        graph="shape:reddit", model="sage", layers=2, hidden=64, mode="sampled", fanout=[10, 5], batch=1024, epochs=3
    )
    return weft.plan(task, machine="h200", budget="6GiB", features="host")


def test_a_plan_with_host_features_has_a_division_and_says_so(report):
    (plan,) = report.plans
    assert isinstance(plan.division, Division)
    assert plan.division.host_batches
    assert any(reason.startswith("batches: ") for reason in plan.why)
    assert report.fits
    assert Plan.from_dict(plan.to_dict()).division == plan.division


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
        check_simulate(tmp_path / "chart.png")
    whole = weft.plan(weft.Task(graph="demo", model="gcn", mode="full"), machine="h200")
    with pytest.raises(SpecError, match="no group has batches that a host and a GPU prepare together"):
        schedules(whole)


def test_one_task_is_chosen_for_with_its_cost_and_reasons():
    task = weft.Task(graph="shape:reddit", model="sage", hidden=32, fanout=[10, 5], batch=512, mode="sampled")
    chosen = choose_for(task, "h200", "80GiB")
    assert chosen.plan.mode == "sampled"
    assert chosen.plan.placement.on_device
    assert chosen.cost.epoch_seconds > 0
    assert any("chosen of" in reason for reason in chosen.plan.why)
    assert chosen.choice.runners_up
