"""``weft plan`` and ``weft probe`` as a user meets them: words, JSON, files, exit codes."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import weft as package
from tests.graphs_for_tests import tiny_graph
from weft.cli.main import main
from weft.core.machine import Machine
from weft.planner.machine_profiles import profile

SPEC = """
graph = "shape:ogbn-arxiv"
seed = [0, 1]
[model]
name = "gcn"
layers = 3
hidden = 64
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty current folder with a spec, and a home of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def test_words(weft):
    code, out, err = weft("plan", "spec.toml", "--machine", "h200")
    assert (code, err) == (0, "")
    for part in (
        "spec: 2 tasks in 1 group",
        "machine   h200 (profile)",
        "fits",
        "group 1: 2 tasks",
        "aggregation",
        "- ",
    ):
        assert part in out
    assert not torch.cuda.is_initialized()


def test_json_has_the_same(weft):
    code, out, _ = weft("plan", "spec.toml", "--machine", "h200", "--json", "--set", "train.epochs=7")
    assert code == 0
    data = json.loads(out)
    assert data["fits"]
    assert len(data["tasks"]) == 2
    assert data["groups"][0]["epochs"] == 7
    assert data["machine"]["name"] == "h200"
    assert data["peak_bytes"] == data["groups"][0]["cost"]["total_bytes"]


def test_the_machine_at_hand_and_a_file(weft, here):
    code, out, _ = weft("plan", "spec.toml", "--set", "graph=demo")
    assert code == 0
    assert "on cpu" in out
    assert "(profile)" in out  # it was not measured
    assert "come from a named profile, not from that machine: `weft probe` measures one" in " ".join(out.split())
    (here / "lab.json").write_text(profile("v100-32g").to_json())
    code, out, _ = weft("plan", "spec.toml", "--machine", "lab.json")
    assert code == 0
    assert "machine   v100-32g" in out


def test_what_does_not_fit_exits_with_4_and_says_what_would(weft):
    code, out, err = weft("plan", "spec.toml", "--machine", "h200", "--budget", "1.5GiB", "--set", "model.hidden=512")
    assert code == 4
    assert err == ""
    assert "does not fit" in out
    assert "nearest plan that fits" in out
    assert "--set " in out


def test_a_chart(weft, here):
    for name in ("plan.html", "plan.svg"):
        code, _, _ = weft("plan", "spec.toml", "--machine", "h200", "--plot", name)
        assert code == 0
        assert "<svg" in (here / name).read_text()


BROKEN = """
from torch import nn


class Model(nn.Linear):
    def __init__(self, inputs, outputs, layers, hidden):
        super().__init__(inputs, outputs)

    def forward(self, x, adj):
        return x.nothing
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.toml"], "none.toml: no such file"),
        (["spec.toml", "--machine", "h2oo"], "there is no machine 'h2oo'; did you mean 'h200'"),
        (["spec.toml", "--machine", "lost.json"], "machine 'lost.json': no such file"),
        (["spec.toml", "--budget", "24 gigs"], "--budget 24 gigs is not an amount of memory; write it like 24GiB"),
        (["spec.toml", "--machine", "h200", "--budget", "9KiB"], "is below the weights and optimizer state"),
        (["spec.toml", "--plot", "plan.pdf"], "must end in .html or .svg"),
        (["spec.toml", "--set", "graph=shape:arxive"], "no shape 'arxive'"),
        (["spec.toml", "--set", "graph=bare"], "graph 'bare' has no features"),
        (["spec.toml", "--set", "graph=unlabelled"], "graph 'unlabelled' has no labels"),
        (["spec.toml", "--set", "model.name=broken.py:Model"], "model broken.py:Model"),
        (["spec.toml", "--set", "model.layer=2"], "did you mean 'model.layers'"),
    ],
)
def test_mistakes_exit_with_2_in_one_sentence(weft, here, arguments, message):
    (here / "broken.py").write_text(BROKEN)
    graph = tiny_graph()
    package.Graph(graph.adj, name="bare").save(here / "bare")
    package.Graph(graph.adj, x=graph.x, name="unlabelled").save(here / "unlabelled")
    code, out, err = weft("plan", *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("weft: error: ")
    assert len(err.splitlines()) == 1


def test_help(weft):
    code, out, _ = weft("plan", "--help")
    assert code == 0
    for word in ("--machine", "--budget", "--json", "--plot", "--set", "Exit codes"):
        assert word in out


# ---- weft probe ----------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """A probe that has measured already: how it measures has tests of its own."""
    found = Machine.from_dict({**profile("cpu").to_dict(), "name": "lab cpu", "measured": True})
    monkeypatch.setattr("weft.engine.probe.probe", lambda device: found)
    return found


def test_a_probe_is_told_kept_and_written(weft, here, quick):
    code, out, err = weft("probe", "--device", "cpu", "--out", "sub/lab.json")
    assert code == 0
    assert "lab cpu: 24.0 GiB on cpu" in out
    assert "GB/s" in out
    kept = here / "home" / "machines" / "lab-cpu" / "probe.json"
    assert f"kept in {kept}" in err
    assert Machine.from_json(kept.read_text(), "kept") == quick
    assert Machine.from_json((here / "sub" / "lab.json").read_text(), "out") == quick
    code, out, _ = weft("plan", "spec.toml", "--machine", "sub/lab.json", "--set", "graph=demo")
    assert code == 0
    assert "machine   lab cpu (measured)" in out


def test_a_run_at_a_terminal_measures_nothing(weft, here, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)  # nor does it start a process that would
    code, _, _ = weft("run", "spec.toml", "--set", "graph=demo", "--set", "train.epochs=1", "--progress", "live")
    assert code == 0
    assert not list((here / "home").rglob("probe*"))


def test_a_probe_as_json(weft, quick):
    _, out, _ = weft("probe", "--json", "--device", "cpu")
    assert Machine.from_json(out, "stdout") == quick


def test_learning_from_runs(weft, here):
    tiny_graph().save(here / "tiny")
    package.run(package.Task(graph="tiny", hidden=8, epochs=6), device="cpu", out=here / "runs" / "a", progress=False)
    code, out, _ = weft("probe", "--learn", "runs", "--machine", "cpu")
    assert code == 0
    assert "learned from 1 runs on cpu" in out
    assert "times the roofline" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "abacus"], "device 'abacus'"),
        (["--learn", "nowhere", "--machine", "cpu"], "no result.json of a finished run"),
        (["--machine", "cpu"], "goes with --learn"),
    ],
)
def test_mistakes_of_a_probe(weft, arguments, message):
    code, _, err = weft("probe", *arguments)
    assert code == 2
    assert message in err


def test_warm_without_a_spec_compiles_for_every_model_that_needs_no_relations(monkeypatch, capsys):
    warmed = []
    monkeypatch.setattr(
        "weft.engine.run_planner.warm_kernels", lambda tasks, *_: warmed.extend(task.model for task in tasks) or 0
    )
    monkeypatch.setattr("weft.ops.launch.backend.have_triton", lambda: True)
    monkeypatch.setattr(sys, "argv", ["weft", "warm", "--arch", "90"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code, capsys.readouterr().err
    assert set(warmed) == {"gcn", "sage", "gin", "gat", "gatv2"}
