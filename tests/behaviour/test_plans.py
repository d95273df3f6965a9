"""Plans name the machine's memory before anything is allocated, and are run as they are."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.behaviour import calls
from tests.behaviour.cases import MACHINES, graph

SWEEP = {"hidden": [8, 64], "seed": range(2), "epochs": 4}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_plan_covers_every_task_and_states_its_bytes(machine):
    report = calls.plan(weft.Sweep("shape:pubmed", model=["gcn", "gat"], **SWEEP), machine=machine)
    assert report.fits
    assert report.peak_bytes == max(group.cost.total_bytes for group in report.groups)
    assert sorted(name for plan in report.plans for name in plan.members) == sorted(task.name for task in report.tasks)
    assert all(plan.why for plan in report.plans)
    assert {plan.device for plan in report.plans} == {"cpu" if machine == "cpu" else "cuda"}
    assert str(report)


def test_what_does_not_fit_is_said_with_the_nearest_that_does():
    task = weft.Task(graph="shape:ogbn-arxiv", model="gin", layers=4, hidden=512, mode="full")
    report = calls.plan(task, machine="v100-32g", budget="2GiB")
    assert not report.fits
    smaller = task.with_values(**dict(report.nearest[0].changes))
    assert calls.plan(smaller, machine="v100-32g", budget="2GiB").fits


def test_a_graph_that_is_too_large_is_sampled():
    report = calls.plan(weft.Task(graph="shape:ogbn-products", model="sage"), machine="v100-32g", budget="7GiB")
    assert report.fits
    assert [plan.mode for plan in report.plans] == ["sampled"]


def test_a_plan_is_run_as_it_is_here_and_from_a_file(tmp_path):
    graph().save(tmp_path / "graph")
    sweep = weft.Sweep(str(tmp_path / "graph"), **SWEEP)
    report = calls.plan(sweep, machine="cpu", budget="1GiB")
    (tmp_path / "plan.json").write_text(report.to_json())
    here, again = calls.run(report), calls.run(calls.read(tmp_path / "plan.json", "plan"))
    assert [plan.members for plan in here.plan] == [plan.members for plan in report.plans]
    assert [result.history for result in here] == [result.history for result in again]


def test_a_plan_is_refused_on_another_graph_or_when_its_file_was_changed(tmp_path):
    graph().save(tmp_path / "graph")
    report = calls.plan(weft.Sweep(str(tmp_path / "graph"), **SWEEP), machine="cpu")
    (tmp_path / "plan.json").write_text(report.to_json())
    (tmp_path / "changed.json").write_text(report.to_json().replace('"hidden": 8', '"hidden": 9'))
    with pytest.raises(weft.InputError):
        calls.run(calls.read(tmp_path / "changed.json", "plan"))
    graph("plain", nodes=90).save(tmp_path / "other")
    (tmp_path / "graph").rename(tmp_path / "before")
    (tmp_path / "other").rename(tmp_path / "graph")
    with pytest.raises(weft.InputError, match="graph"):
        calls.run(calls.read(tmp_path / "plan.json", "plan"))


def test_a_plan_for_a_gpu_is_refused_on_a_cpu():
    with pytest.raises(weft.InputError, match=r"cpu|CPU"):
        calls.run(calls.plan(weft.Task(graph=graph(), hidden=8), machine="h200"), device="cpu")


def test_a_run_that_cannot_keep_within_its_budget_is_refused_before_it_begins():
    seen = []
    with pytest.raises(weft.OutOfMemoryError):
        calls.run(weft.Task(graph=graph(), hidden=4096, layers=4), budget="600MiB", on_event=seen.append)
    assert "progress" not in {event.kind for event in seen}


def test_an_unknown_machine_is_named():
    with pytest.raises(weft.InputError, match="h2000"):
        calls.plan(weft.Task(graph="demo"), machine="h2000")


@pytest.mark.parametrize(("parameter", "given"), [("adj", "x and the adjacency"), ("edge_index", "x, edge_index")])
def test_a_plan_says_how_a_module_is_called(parameter, given):
    class Net(torch.nn.Linear):
        if parameter == "adj":

            def forward(self, x, adj):
                return super().forward(x)
        else:

            def forward(self, x, edge_index):
                return super().forward(x)

    report = calls.plan(weft.Task(graph=graph(), model=Net), machine="cpu")
    assert any(reason.startswith(f"Net.forward is called with {given}") for reason in report.plans[0].why)
