"""A plan is executable: run here, or from a file in another process, it does what it says or refuses in a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import DoesNotFitError, SpecError
from weft.core.plan import Stage
from weft.engine import run_planner as plan_checks
from weft.engine.machine import load_calibration, machine_with
from weft.planner.machine_profiles import profile
from weft.planner.report.plan_report import PlanReport
from weft.runtime.checkpoint import read_checkpoint

SRC = Path(__file__).parents[3] / "src"
CPU = torch.device("cpu")
QUIET = {"device": "cpu", "progress": False}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A current folder with a graph in it."""
    monkeypatch.chdir(tmp_path)
    tiny_graph().save(tmp_path / "tiny")
    return tmp_path


class Killed(BaseException):
    """Raised from a listener to leave a run in the middle."""


def sweep(**settings) -> weft.Sweep:
    return weft.Sweep("tiny", **{"hidden": [4, 8], "epochs": 6, "seed": range(3), **settings})


def small_budget() -> int:
    """Bytes for some of the members of :func:`sweep` at a time, so that its groups are not those of a run without."""
    whole, alone = (weft.plan(work, machine="cpu").peak_bytes for work in (sweep(), sweep(hidden=8, seed=0)))
    return (whole + alone) // 2


def through_json(report: PlanReport) -> PlanReport:
    return PlanReport.from_json(report.to_json(), "p.json")


def groups_of(result) -> list[tuple]:
    return [(plan.members, plan.join, plan.stacks) for plan in result.plan]


def scores(result) -> dict[str, list[float]]:
    return {member.name: member.history["loss"] for member in result}


# ---- it does what it says ------------------------------------------------------------------------------


def test_a_plan_is_run_as_it_was_made():
    report = weft.plan(sweep(), machine="cpu", budget=small_budget())
    result = weft.run(report, **QUIET)
    planned = [(group.plan.members, group.plan.join, group.plan.stacks) for group in report.groups]
    assert groups_of(result) == planned
    assert len(planned) > len(weft.run(sweep(), **QUIET).plan)  # not what a run would have chosen by itself
    assert [plan.compiled for plan in result.plan] == [plan.compiled for plan in report.plans]
    assert scores(result) == scores(weft.run(sweep(), budget=small_budget(), **QUIET))


def test_a_plan_from_a_file_in_a_fresh_process(here):
    report = weft.plan(sweep(), machine="cpu", budget=small_budget())
    (here / "p.json").write_text(report.to_json())
    command = [sys.executable, "-m", "weft", "run", "p.json", "--out", "out", "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept = json.loads((here / "out" / "sweep.json").read_text())
    assert [one["plan"]["members"] for one in kept["groups"]] == [list(plan.members) for plan in report.plans]
    assert [one["plan"]["join"] for one in kept["groups"]] == [plan.join for plan in report.plans]
    here_and_now = scores(weft.run(sweep(), budget=small_budget(), **QUIET))
    for name, losses in here_and_now.items():
        (folder,) = [p for p in (here / "out" / "tasks").iterdir() if _name(p) == name]
        assert json.loads((folder / "result.json").read_text())["history"]["loss"] == losses


def _name(folder: Path) -> str:
    return json.loads((folder / "result.json").read_text())["task"]["name"]


def test_a_plan_of_one_task_gives_one_result():
    task = weft.Task(graph="tiny", hidden=4, epochs=5)
    result = weft.run(through_json(weft.plan(task, machine="cpu")), **QUIET)
    assert isinstance(result, weft.Result)
    assert result.history == weft.run(task, **QUIET).history


def test_a_list_is_planned_under_the_names_that_it_runs_under():
    tasks = [weft.Task(graph="tiny", hidden=width, epochs=3) for width in (4, 8)]
    report = weft.plan(tasks, machine="cpu")
    result = weft.run(report, **QUIET)
    assert [member.name for member in result] == [task.name for task in report.tasks]
    assert scores(result) == scores(weft.run(tasks, **QUIET))


def test_objects_are_run_where_they_were_planned():
    report = weft.plan(weft.Task(graph=tiny_graph(), model=lambda i, o: weft.nn.GCNConv(i, o), epochs=3), machine="cpu")
    assert weft.run(report, **QUIET).metrics["epochs_run"] == 3


def test_settings_of_members_are_not_written_with_every_member(here):
    result = weft.run(weft.plan(sweep(), machine="cpu"), out=here / "out", **QUIET)
    files = list((here / "out").glob("tasks/*/result.json"))
    assert len(files) == len(list(result)) > 1
    for file in files:
        assert "tasks" not in json.loads(file.read_text())["plan"]


def test_a_plan_is_resumed(here):
    report = weft.plan(sweep(epochs=20), machine="cpu", budget=small_budget())
    whole = weft.run(report, **QUIET)

    def leave(event):
        if event.kind == "checkpoint" and "groups/2" in event.data["path"]:
            raise Killed

    with pytest.raises(Killed):
        weft.run(report, out=here / "out", on_event=leave, options=weft.RunOptions(checkpoint_every=0.0), **QUIET)
    assert 0 < read_checkpoint(here / "out" / "groups" / "2").about["epoch"] < 20
    resumed = weft.run(through_json(report), out=here / "out", resume=True, **QUIET)
    assert scores(resumed) == scores(whole)
    assert groups_of(resumed) == groups_of(whole)


def test_what_is_predicted_for_other_rates_teaches_nothing():
    work = weft.Task(graph="tiny", hidden=4, epochs=20)
    weft.run(weft.plan(work, machine=profile("cpu").with_device(copy_bandwidth=1e9)), **QUIET)
    assert load_calibration(machine_with(CPU)) is None
    weft.run(weft.plan(work), **QUIET)
    assert load_calibration(machine_with(CPU)) is not None


# ---- it is data ----------------------------------------------------------------------------------------


def test_a_report_goes_through_json():
    report = weft.plan(sweep(), machine="cpu", budget=small_budget())
    again = through_json(report)
    assert again == report
    assert again.to_dict() == report.to_dict()
    assert str(again) == str(report)
    assert again.work == sweep()


def test_a_report_that_names_what_would_fit_goes_through_json():
    report = weft.plan(weft.Task(graph="shape:ogbn-arxiv", hidden=512), machine="h200", budget="1.5GiB")
    assert report.nearest
    assert through_json(report) == report


def test_every_group_has_what_it_needs_to_be_run_elsewhere():
    report = weft.plan(sweep(), machine="cpu", budget="1GiB")
    for plan in report.plans:
        assert plan.stages == (Stage("train", "cpu"),)
        assert (plan.mode, plan.shards, plan.budget) == ("full", 1, 2**30)
        assert tuple(task.label for task in plan.tasks) == plan.members
        assert plan.graph == tiny_graph().stats().fingerprint()
        assert len(plan.weights) == len(plan.stack_members)
    assert weft.plan(sweep(), machine="h200").plans[0].stages == (Stage("train", "gpu"),)
    assert weft.plan(sweep(), machine="cpu").plans[0].budget is None


# ---- or it refuses -------------------------------------------------------------------------------------


def refusal(report, error=SpecError, **options) -> str:
    """The one sentence; nothing is written before it."""
    with pytest.raises(error) as caught:
        weft.run(report, **{**QUIET, "out": "refused", **options})
    assert not Path("refused").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_graph(here):
    report = through_json(weft.plan(sweep(), machine="cpu"))
    tiny_graph(seed=5).save(here / "tiny", overwrite=True)
    assert "graph 'tiny' had 60 nodes, " in refusal(report)
    tiny_graph().random_split(train=10, val=10).save(here / "tiny", overwrite=True)
    assert refusal(report) == (
        "task 'hidden=4 seed=0': graph 'tiny' has other degrees, features or splits than when this was planned; "
        "plan again"
    )


def test_a_graph_that_is_gone(here):
    report = through_json(weft.plan(sweep(), machine="cpu"))
    (here / "tiny").rename(here / "elsewhere")
    assert "tiny" in refusal(report, weft.GraphError)


NET = """
import torch, weft
class Net(torch.nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.first, self.last = weft.nn.GCNConv(inside, {width}), weft.nn.GCNConv({width}, outside)
    def forward(self, x, graph):
        return self.last(torch.relu(self.first(x, graph)), graph)
"""


def test_a_module_whose_weights_have_changed(here):
    (here / "net.py").write_text(NET.format(width=4))
    report = weft.plan(weft.Task(graph="tiny", model="net.py:Net", epochs=3, name="mine"), machine="cpu")
    (here / "p.json").write_text(report.to_json())
    assert weft.run(weft.read("p.json"), **QUIET).metrics["epochs_run"] == 3
    (here / "net.py").write_text(NET.format(width=6))
    message = refusal(weft.read("p.json"))
    assert message == (
        "task 'mine': model net.py:Net has other weights, by name or shape, than when this was planned; plan again"
    )


def test_a_group_whose_weights_are_others():
    """Also of built-in models, should they have changed between versions."""
    report = weft.plan(weft.Task(graph="tiny", epochs=3), machine="cpu")
    (group,) = report.groups
    other = replace(report, groups=(replace(group, plan=replace(group.plan, weights=("0" * 16,))),))
    assert "model gcn has other weights" in refusal(other)


def test_settings_that_were_changed_in_the_file():
    data = json.loads(weft.plan(sweep(), machine="cpu").to_json())
    data["groups"][0]["plan"]["tasks"][0]["lr"] = 0.5
    with pytest.raises(SpecError, match=r"^p.json: settings or groups were changed after it was planned; plan again"):
        PlanReport.from_json(json.dumps(data), "p.json")


def test_settings_that_mean_something_else_now():
    report = weft.plan(sweep(), machine="cpu")
    data = replace(report, work=sweep(lr=0.5)).to_dict()
    with pytest.raises(SpecError, match=r"was planned with lr=0.01, but has lr=0.5; plan again"):
        PlanReport.from_dict(data)
    data = replace(report, work=sweep(seed=range(2))).to_dict()
    with pytest.raises(SpecError, match=r"is not in both the sweep and its groups; plan again"):
        PlanReport.from_dict(data)


def test_not_enough_memory(monkeypatch):
    report = weft.plan(sweep(), machine="cpu")
    assert "bytes" in refusal(report, DoesNotFitError, budget="10KiB")
    monkeypatch.setattr("weft.engine.memory.free_host_bytes", lambda: 20 << 10)
    message = refusal(report, DoesNotFitError)
    assert "group 1 of the plan ('hidden=4 seed=0' and 5 more) needs" in message
    assert "only 19.0 KiB may be taken on this device" in message


def test_a_plan_that_does_not_fit_where_it_was_made():
    report = weft.plan(weft.Task(graph="shape:ogbn-arxiv", hidden=512), machine="cpu", budget="100MiB")
    assert "does not fit" in refusal(report, DoesNotFitError)


def test_another_kind_of_device(monkeypatch):
    report = weft.plan(sweep(), machine="h200")
    assert refusal(report, device="auto") == (
        "plan 'sweep' is for a cuda device (h200), but there is none here; plan again with the machine to run on"
    )
    assert "but device='cpu' is another kind" in refusal(report)
    monkeypatch.setattr(plan_checks, "choose_device", lambda wanted: torch.device("cuda", 0))
    planned = weft.plan(sweep(), machine="cpu")
    assert plan_checks.device_of(planned, "auto") == CPU  # where there is a GPU as well
    assert "is for a cpu device (cpu), but device='cuda' is another kind" in refusal(planned, device="cuda")


@pytest.mark.parametrize("what", ["graph", "model"])
def test_objects_that_a_file_cannot_hold(what):
    given = {"graph": tiny_graph()} if what == "graph" else {"model": lambda i, o: nn.Linear(i, o)}
    report = weft.plan(weft.Task(**{"graph": "tiny", "name": "mine", **given}), machine="cpu")
    with pytest.raises(SpecError, match=rf"task 'mine': its {what} <.*> was given as an object, which a file cannot"):
        report.to_json()
    with pytest.raises(SpecError, match=rf"task 'mine': its {what} <.*> was given as an object"):
        PlanReport.from_dict(json.loads(json.dumps(report.to_dict())))


@pytest.mark.parametrize(("choice", "value"), [("weave", "off"), ("compile", False)])
def test_what_the_plan_has_decided(choice, value):
    message = refusal(weft.plan(sweep(), machine="cpu"), options=weft.RunOptions(**{choice: value}))
    assert message == f"{choice}={value!r}: plan 'sweep' has decided that already; give it to weft.plan"


def test_what_this_version_cannot_run():
    report = weft.plan(sweep(), machine="cpu")
    (group,) = report.groups
    other = replace(report, groups=(replace(group, plan=replace(group.plan, shards=2)),))
    assert "2 shards are more than this run has devices for" in refusal(other)
    assert "has no tasks in it" in refusal(replace(report, work=None))


def test_resuming_a_run_of_other_groups(here):
    weft.run(sweep(), out=here / "out", **QUIET)
    report = weft.plan(sweep(), machine="cpu", budget=small_budget())
    with pytest.raises(SpecError, match=r"out: was trained in other groups than this plan has"):
        weft.run(report, out=here / "out", resume=True, **QUIET)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds list, not a plan"),
        ("{}", "not a plan; `weft plan SPEC --out FILE` writes one"),
        ('{"format": "weft plan", "version": 99}', "a plan of version 99, but Weft .* reads version 1; plan again"),
        ('{"format": "weft plan", "version": 1}', "a damaged plan .*; plan again"),
    ],
)
def test_files_that_are_no_plans(here, text, message):
    (here / "p.json").write_text(text)
    with pytest.raises(SpecError, match=f"^p.json: {message}"):
        weft.read("p.json")


def test_files_that_are_not_there():
    with pytest.raises(SpecError, match=r"plan 'lost.json': no such file; `weft plan SPEC --out FILE` writes one"):
        weft.read("lost.json")
