"""``python -m weft``: what it prints, leaves and answers, and its exit codes."""

from __future__ import annotations

import csv
import json

import pytest

import weft
from tests.behaviour import calls
from tests.behaviour.cases import graph

SPEC = """
graph = "graph"
seed = [0, 1]
[model]
name = "gcn"
hidden = 8
[train]
epochs = 5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A spec, the graph that it names, and a run of it."""
    path = tmp_path_factory.mktemp("shell")
    graph().save(path / "graph")
    (path / "spec.toml").write_text(SPEC)
    ended = calls.shell("run", "spec.toml", "--device", "cpu", "--out", "run", "--json", cwd=path)
    assert ended.returncode == 0, ended.stderr
    (path / "printed.jsonl").write_text(ended.stdout)
    return path


def test_a_run_prints_events_and_leaves_its_files(folder):
    events = [json.loads(line) for line in (folder / "printed.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert (kinds.count("end"), kinds[-1]) == (2, "finish")
    assert {"result.json", "report.html", "events.jsonl"} <= {path.name for path in (folder / "run").iterdir()}


def test_the_numbers_are_those_of_python(folder):
    expected = calls.run(weft.Sweep(calls.load(folder / "graph"), hidden=8, seed=[0, 1], epochs=5))
    found = calls.read(folder / "run", "result")
    assert [result.history["loss"] for result in found] == [
        pytest.approx(result.history["loss"], rel=1e-5) for result in expected
    ]


def test_a_spec_is_the_sweep_that_it_describes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    sweep = calls.read("spec.toml", "spec")
    assert [(task.model, task.hidden, task.epochs, task.seed) for task in sweep] == [("gcn", 8, 5, 0), ("gcn", 8, 5, 1)]


def test_predictions_are_a_row_per_node(folder, monkeypatch):
    monkeypatch.chdir(folder)  # the run names its graph by a relative path
    ended = calls.shell("predict", "run", "--out", "classes.csv", "--nodes", "test", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    rows = list(csv.DictReader((folder / "classes.csv").read_text().splitlines()))
    best = calls.read(folder / "run", "result").best()
    assert [int(row["class"]) for row in rows] == best.predict(nodes="test").tolist()


def test_a_plan_is_written_and_run(folder):
    planned = calls.shell("plan", "spec.toml", "--machine", "cpu", "--out", "plan.json", "--json", cwd=folder)
    assert planned.returncode == 0, planned.stderr
    ran = calls.shell("run", "plan.json", "--out", "planned", "--json", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    found = [result.history["loss"] for result in calls.read(folder / "planned", "result")]
    assert found == [result.history["loss"] for result in calls.read(folder / "run", "result")]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "none.toml"], 2, "none.toml"),
        (["run", "spec.toml", "--set", "train.lrr=1"], 2, "train.lr"),
        (["run", "spec.toml", "--set", "model.hidden=0"], 2, "hidden=0"),
        (["run", "spec.toml", "--out", "run"], 2, "resume"),
        (["plan", "spec.toml", "--machine", "cpu", "--budget", "20KiB"], 4, ""),
        (["jump"], 2, "jump"),
    ],
)
def test_a_mistake_has_an_exit_code_and_no_traceback(folder, arguments, code, words):
    ended = calls.shell(*arguments, cwd=folder)
    assert ended.returncode == code
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_policies_are_simulated():
    ended = calls.shell("queue", "simulate", "--tasks", 30, "--seed", 2, "--policy", "lmcf", "--json")
    (simulation,) = json.loads(ended.stdout)["simulations"]
    names = [name for group in simulation["groups"] for name in group["members"]]
    assert len(names) == len(set(names)) == 30
    assert simulation["metrics"]["makespan"] == max(group["end"] for group in simulation["groups"])


def test_the_version_is_the_packages():
    assert weft.__version__ in calls.shell("--version").stdout
