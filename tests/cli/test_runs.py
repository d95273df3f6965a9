"""``weft ls``: what lies on disk."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_the_shell_can_complete_commands(weft, monkeypatch):
    code, out, _ = weft("--help")
    assert code == 0
    assert "--install-completion" in out
    monkeypatch.setenv("_WEFT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "weft pre")
    monkeypatch.setenv("COMP_CWORD", "1")
    code, out, _ = weft()
    assert (code, out.split()) == (0, ["predict"])
