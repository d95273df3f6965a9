"""``weft ls`` and ``weft compare``: what lies on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from weft import Sweep, run
from weft.core.event import Event

SPEC = 'graph = "demo"\nseed = [0, 1]\n[model]\nhidden = [4, 8]\n[train]\nepochs = 3\n'


def test_runs_on_disk(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(SPEC)
    assert weft("run", "s.toml", "--device", "cpu")[0] == 0
    assert (
        weft("run", "s.toml", "--device", "cpu", "--out", "runs/one", "--set", "seed=0", "--set", "model.hidden=4")[0]
        == 0
    )
    Path("runs/bad").mkdir()
    Path("runs/bad/events.jsonl").write_text(Event("note", "a").to_json() + "\n")
    Path("runs/bad/result.json").write_text("{")
    code, out, _ = weft("ls")
    assert code == 0
    bad, one, sweep = out.splitlines()[1:]
    best = json.loads(Path("runs/s/result.json").read_text())["best_settings"]
    assert "4 of 4" in sweep
    assert best in sweep
    assert "gcn" in sweep
    assert "1 of 1  val accuracy 0." in one
    assert "cannot be read" in bad
    code, out, _ = weft("ls", "runs", "--json")
    assert [json.loads(line)["run"] for line in out.splitlines()] == ["runs/bad", "runs/one", "runs/s"]
    code, _, err = weft("ls", "nowhere")
    assert code == 2
    assert err == "weft: error: nowhere: no such folder; give the one that --out of your runs lies in\n"


def test_a_task_that_was_fetched_from_a_server_is_a_run(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(SPEC)
    assert weft("run", "s.toml", "--device", "cpu", "--set", "seed=0", "--set", "model.hidden=4")[0] == 0
    for file in ("events.jsonl", "report.html", "checkpoint.safetensors"):  # which are not fetched
        Path("runs/s", file).unlink()
    answers = Path("runs/answers")
    answers.mkdir()
    (answers / "predictions.safetensors").touch()
    (answers / "result.json").write_text(json.dumps({"format": 1, "kind": "inference", "task": {"graph": "demo"}}))
    code, out, _ = weft("ls")
    assert (code, len(out.splitlines())) == (0, 2)
    assert "1 of 1  val accuracy 0." in out
    code, _, err = weft("predict", "runs/answers")
    assert (code, err.count("\n")) == (2, 1)
    assert "is of an inference task; its logits are in predictions.safetensors" in err


class Net(nn.Module):
    def __init__(self, features, classes, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x, edge_index):
        return self.layers(x)


def test_runs_are_compared(weft, tmp_path, monkeypatch):
    """Sweeps, single runs and models that were objects in one table per graph; what cannot be read is named."""
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(SPEC)
    for name, *changes in (
        ("a",),
        ("one", "seed=0", "model.hidden=4", "train.lr=0.1", "train.epochs=4"),
        ("again", "model.hidden=8"),
        ("other", "graph=shape:cora"),
    ):
        words = [word for change in changes for word in ("--set", change)]
        assert weft("run", "s.toml", "--device", "cpu", "--out", f"runs/{name}", *words)[0] == 0
    run(Sweep("demo", Net, model_args={"width": [4, 8]}, epochs=3), device="cpu", out="runs/own", progress=False)
    Path("runs/cut").mkdir()
    code, out, err = weft(
        "compare", "runs/a", "runs/one", "runs/again", "runs/other", "runs/own", "runs/cut", "--out", "p/c.html"
    )
    assert code == 0
    assert err == (
        "weft: left out: runs/cut: is no folder of a run (there is no result.json); a run writes one when it ends\n"
        "page: p/c.html\n"
    )
    demo, cora = out.strip().split("\n\n")
    assert demo.splitlines()[0] == "val accuracy on demo"
    assert cora.splitlines()[0] == "val accuracy on shape:cora"
    assert cora.splitlines()[-1].startswith("runs/other")
    rows = {line.split()[0]: line for line in demo.splitlines()[2:-1]}
    assert set(rows) == {"runs/a", "runs/one", "runs/again", "runs/own"}
    assert rows["runs/one"].endswith("gcn hidden=4 lr=0.1 epochs=4")
    best = json.loads(Path("runs/a/result.json").read_text())["best_settings"]  # hidden=8 (val accuracy 0.2 ± 0.1, ...
    assert best.partition(" (val accuracy ")[2].partition(",")[0] in rows["runs/a"]
    assert "2 seeds" in rows["runs/a"]
    assert "1 seed " in rows["runs/one"]
    assert " ahead of " in demo.splitlines()[-1] or "Level with" in demo.splitlines()[-1]
    page = Path("p/c.html").read_text()
    assert page.count("<polyline") == 2 * (2 + 1 + 2 + 1) + 2 * 2  # two charts per graph, a line per seed
    assert "runs/cut: is no folder of a run" in page
    code, out, _ = weft("compare", "runs/a", "runs/again", "runs/one", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    scores = [line["val_accuracy_mean"] for line in lines]
    assert scores == sorted(scores, reverse=True)
    assert {line["run"]: line["members"] for line in lines} == {"runs/a": 2, "runs/again": 2, "runs/one": 1}
    assert {line["run"]: line["differs"]["lr"] for line in lines}["runs/one"] == 0.1


def test_nothing_to_compare(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = weft("compare", "nowhere")
    assert (code, out) == (2, "")
    assert err.startswith("weft: error: left out: nowhere: does not exist")


def test_the_shell_can_complete_commands(weft, monkeypatch):
    code, out, _ = weft("--help")
    assert code == 0
    assert "--install-completion" in out
    monkeypatch.setenv("_WEFT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "weft pre")
    monkeypatch.setenv("COMP_CWORD", "1")
    code, out, _ = weft()
    assert (code, out.split()) == (0, ["predict"])


@pytest.mark.parametrize("command", [(), ("run",), ("plan",), ("ls",), ("compare",), ("serve",), ("data", "convert")])
def test_flags_have_no_kind_of_value_in_the_help(weft, command):
    code, out, _ = weft(*command, "--help")
    assert code == 0
    assert "-h" in out
    assert "bool" not in out
