"""``weft tune`` as a user meets it: the section [tune], output, what is refused, Ctrl-C and --resume."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.graphs_for_tests import tiny_graph

SPEC = """
graph = "tiny"
[model]
hidden = [4, 8]
[train]
epochs = 6
lr = { loguniform = [1e-3, 1e-1] }
"""
TUNE = '[tune]\ntuner = "asha"\ntrials = 8\nwidth = 2\neta = 2\n'


@pytest.fixture(autouse=True)
def spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_graph().save("tiny")
    (tmp_path / "space.toml").write_text(SPEC, encoding="utf-8")
    (tmp_path / "search.toml").write_text(SPEC + TUNE, encoding="utf-8")


def test_a_search_as_the_spec_has_it(weft, tmp_path):
    code, out, _ = weft("tune", "search.toml", "--device", "cpu", "--progress", "plain")
    assert code == 0
    assert out.startswith("8 tasks: ")
    assert "best: trial-00" in out
    result = json.loads((tmp_path / "runs" / "search" / "result.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in result["tasks"]] == [f"trial-00{number}" for number in range(8)]
    listed = weft("ls", "runs")[1]
    assert "8 of 8" in listed


def test_options_replace_what_the_spec_says(weft):
    for start in (["space.toml", "--tuner", "random"], ["search.toml"]):
        words = [*start, "--trials", 3, "--out", start[0][:3], "--device", "cpu", "--progress", "plain"]
        code, out, _ = weft("tune", *words)
        assert code == 0
        assert out.startswith("3 tasks: ")


def test_a_plan_reads_the_section_too(weft):
    assert "8 trials by ASHA in 2 rows" in weft("plan", "search.toml", "--machine", "h200")[1]
    assert "5 trials by Tuner in 5 rows" in " ".join(
        weft("plan", "space.toml", "--machine", "h200", "--tuner", "random", "--trials", 5)[1].split()
    )


OWN = """
import weft
class Net(weft.nn.GCNConv):
    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features, out_features, bias=bias)
"""


def test_a_model_of_a_file_is_searched_resumed_and_exported(weft, tmp_path):
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    model = '[model]\nname = "own.py:Net"\nargs = { bias = [true, false] }'
    (tmp_path / "own.toml").write_text(SPEC.replace("[model]\nhidden = [4, 8]", model) + TUNE, encoding="utf-8")
    for more in ([], ["--resume"]):
        code, out, _ = weft("tune", "own.toml", "--device", "cpu", "--progress", "plain", *more)
        assert code == 0
        assert out.startswith("8 tasks: ")
        assert "best: trial-00" in out
    assert weft("export", "runs/own", "--to", "safetensors", "--out", "best.safetensors")[0] == 0
    assert (tmp_path / "best.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune", "space.toml"], "--tuner says who chooses the trials: random, asha"),
        (["tune", "space.toml", "--tuner", "asha"], "needs --trials"),
        (["tune", "search.toml", "--tuner", "pbt"], "tuner 'pbt' has no setting 'eta'"),
        (["tune", "search.toml", "--tuner", "assha"], "did you mean 'asha'"),
        (["tune", "search.toml", "--set", "tune.eta=0"], "eta=0.0 must be above 1"),
        (["tune", "search.toml", "--ranks", 2], "does not go with --ranks 2"),
        (["run", "search.toml"], "has a section [tune], which `weft tune` and `weft plan` read"),
        (["run", "space.toml"], "is drawn; say how often with samples="),
        (["plan", "search.toml", "--gpus", 2], "--gpus does not go with a tuner"),
        (["submit", "search.toml"], "has a section [tune]"),
    ],
)
def test_mistakes_are_one_line(words, message, weft):
    code, _, err = weft(*words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.rest
def test_ctrl_c_says_how_to_continue_and_resume_does(tmp_path):
    words = ["tune", "search.toml", "--out", "one", "--device", "cpu", "--set", "train.epochs=400", "--trials", "6"]
    process = subprocess.Popen(
        [sys.executable, "-m", "weft", *words, "--progress", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "progress":
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate()
    assert process.returncode == 130
    command = err.decode().splitlines()[-1].split()
    assert command[:2] == ["weft", "tune"]
    assert "--resume" in command
    again = subprocess.run([sys.executable, "-m", *command, "--progress", "plain"], capture_output=True, check=False)
    assert again.returncode == 0, again.stderr
    assert again.stdout.decode().startswith("6 tasks: ")
