"""``weft run`` as a user meets it: output, exit codes, Ctrl-C, resume."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.graphs_for_tests import tiny_graph
from weft.core.version import __version__
from weft.runtime.checkpoint import read_checkpoint

SPEC = """
graph = "tiny"
[model]
name = "gcn"
hidden = 8
[train]
epochs = 12
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """A spec beside a saved graph, in the current folder."""
    monkeypatch.chdir(tmp_path)
    tiny_graph().save(tmp_path / "tiny")
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    return path


def events(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_prints_events_and_leaves_files(weft, spec):
    code, out, err = weft("run", spec, "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    lines = events(out)
    assert [line["event"] for line in lines[:2]] == ["preparing", "start"]
    assert lines[-1]["event"] == "finish"
    assert "rows" not in {line["event"] for line in lines}, "every epoch is in the journal alone"
    assert '{"event": "rows"' in Path("runs/spec/events.jsonl").read_text()
    assert lines[-1]["metrics"]["epochs_run"] == 12
    saved = json.loads(Path("runs/spec/result.json").read_text())
    assert saved["metrics"] == lines[-1]["metrics"]
    assert saved["task"]["name"] == "spec"


def test_overrides_and_folder(weft, spec, tmp_path):
    code, out, _ = weft(
        "run", spec, "--json", "--out", tmp_path / "o", "--set", "train.epochs=3", "--set", "model.name=sage"
    )
    assert code == 0
    assert (tmp_path / "o" / "report.html").exists()
    settings = events(out)[1]["settings"]
    assert (settings["epochs"], settings["model"]) == (3, "sage")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "none.toml"], "weft: error: none.toml: no such file"),
        (["run", "spec.toml", "--set", "train.lrr=1"], "did you mean 'train.lr'"),
        (["run", "spec.toml", "--set", "model.hidden=0"], "weft: error: task 'spec': hidden=0 must be at least 1"),
        (["run", "spec.toml", "--set", "seed=[0, 0]"], "sweep 'spec': seed lists 0 2 times"),
        (["run", "spec.toml", "--set", "seed=[0, 1]", "--prune", "worst"], "--prune worst must be 'median'"),
        (["run", "spec.toml", "--set", "graph=nothing-like-it"], "nothing-like-it"),
        (["run", "spec.toml", "--device", "abacus"], "device 'abacus'"),
        (["run"], "Missing argument"),
        (["run", "spec.toml", "--no-such-option"], "No such option"),
        (["jump"], "No such command"),
    ],
)
def test_mistakes_exit_with_2_and_no_traceback(weft, spec, arguments, message):
    code, _, err = weft(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_failed_training_exits_with_3(weft, spec):
    code, out, err = weft("run", spec, "--json", "--set", "train.optimizer=sgd", "--set", "train.lr=1e12")
    assert code == 3
    assert "became" in err
    assert "lower lr" in err
    assert events(out)[-1]["event"] == "failed"


def test_what_does_not_fit_into_the_budget_exits_with_4_before_it_begins(weft, spec, tmp_path):
    wide = ("--set", "graph=shape:ogbn-arxiv", "--set", "model.hidden=2048", "--budget", "1GiB", "--device", "cpu")
    code, out, err = weft("run", spec, *wide, "--json", "--out", tmp_path / "out")
    assert code == 4
    assert "of 1.00 GiB: does not fit; nearest plan that fits: " in err
    assert [event["event"] for event in events(out)] == ["failed"]
    assert not (tmp_path / "out").exists()
    code, _, _ = weft("run", spec, "--budget", "1GiB", "--device", "cpu", "--set", "train.epochs=2")
    assert code == 0


def test_faults_of_our_own_exit_with_1_and_ask_for_a_report(weft, spec, monkeypatch):
    monkeypatch.setattr("weft.cli.spec.read_with_options", lambda *_: 1 / 0)
    code, _, err = weft("run", spec)
    assert code == 1
    assert "ZeroDivisionError" in err
    assert "report" in err
    assert "Traceback" not in err
    code, _, err = weft("--debug", "run", spec)
    assert code == 1
    assert "Traceback" in err


def test_help_and_version(weft):
    assert weft("--version")[:2] == (0, f"weft {__version__}\n")
    code, out, _ = weft("run", "--help")
    assert code == 0
    for word in ("--device", "--out", "--json", "--resume", "--set", "Exit codes"):
        assert word in out


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["run", "--help"], ["plan", "-h"], ["data", "-h"]])
def test_help_and_version_do_not_wait_for_torch(words):
    code = (
        "import atexit, sys; from weft.cli.main import main; sys.argv = ['weft', *sys.argv[1:]];"
        "atexit.register(lambda: print('LOADED', sorted({'torch', 'numpy', 'numba'} & set(sys.modules)))); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_a_finished_run_is_reported_by_resume(weft, spec):
    weft("run", spec)
    code, out, _ = weft("run", spec, "--resume", "--json")
    assert code == 0
    assert [line["event"] for line in events(out)] == ["preparing", "start", "note", "finish"]


def test_a_run_is_kept_unless_it_is_to_be_overwritten(weft, spec):
    weft("run", spec)
    before = Path("runs/spec/result.json").read_bytes()
    code, _, err = weft("run", spec)
    assert code == 2
    assert err.startswith("weft: error: --out runs/spec: holds a run already; ")
    assert "--resume" in err
    assert "--overwrite" in err
    assert "=True" not in err
    assert Path("runs/spec/result.json").read_bytes() == before
    assert weft("run", spec, "--overwrite")[0] == 0
    assert weft("run", spec, "--overwrite", "--resume")[0] == 2


@pytest.mark.parametrize(
    ("answer", "code", "said"), [("r", 0, "resumed after epoch 12"), ("o", 0, "12/12"), ("", 2, "--overwrite")]
)
def test_a_terminal_is_asked_about_a_run_that_is_there(weft, spec, monkeypatch, answer, code, said):
    weft("run", spec)
    before = Path("runs/spec/events.jsonl").read_text()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    stdin = io.StringIO(answer + "\n")
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    found, _, err = weft("run", spec)
    assert found == code
    assert "runs/spec holds a run already. Resume it, overwrite it, or quit?" in err
    assert said in err
    assert Path("runs/spec/events.jsonl").read_text().startswith(before) == (answer != "o")


def test_resume_where_nothing_is_says_so_first(weft, spec):
    code, out, _ = weft("run", spec, "--resume", "--json")
    assert code == 0
    assert events(out)[0]["message"] == "no checkpoint to resume from; starting afresh"


FAILING = """
from torch import nn
class Net(nn.Module):
    def __init__(self, i, o, **settings):
        super().__init__()
        self.layer = nn.Linear(i, o)
    def forward(self, x):
        if self.training:
            raise ValueError("not today")
        return self.layer(x)
"""


def test_a_module_that_raises_costs_nobody_else_and_alone_exits_with_3(weft, spec):
    Path("net.py").write_text(FAILING)
    code, out, err = weft("run", spec, "--json", "--set", 'model.name=["gcn", "net.py:Net"]')
    assert code == 0
    assert events(out)[-1]["statuses"] == {"finished": 1, "failed": 1}
    assert re.search(
        r"^weft: task '.*net.py:Net': model .* raised ValueError: not today \(line 9 of .*net.py\)$", err, re.M
    )
    assert "fault of Weft" not in err
    code, _, err = weft("run", spec, "--set", "model.name=net.py:Net", "--overwrite")
    assert code == 3
    assert "line 9 of" in err
    assert "Traceback" not in err


def test_resume_with_other_settings_is_refused(weft, spec):
    weft("run", spec)
    code, _, err = weft("run", spec, "--resume", "--set", "train.lr=0.5")
    assert code == 2
    assert "was trained with lr=0.01" in err


def test_resume_on_another_graph_is_refused(weft, spec, tmp_path):
    weft("run", spec)
    tiny_graph(seed=1).save(tmp_path / "tiny", overwrite=True)
    code, _, err = weft("run", spec, "--resume")
    assert code == 2
    assert "was trained on another graph" in err


def test_a_terminal_gets_a_live_line_and_a_summary(weft, spec, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = weft("run", spec)
    assert code == 0
    assert "12/12" in err
    assert "tiny (60 nodes" in err
    assert "best epoch" in out
    assert "report.html" in out


SWEEP = ["--set", "model.hidden=[4, 8]", "--set", "train.lr=[0.01, 0.1]", "--set", "seed=[0, 1]"]


def test_a_list_is_a_sweep(weft, spec):
    code, out, err = weft("run", spec, "--json", "--out", "o", *SWEEP)
    assert (code, err) == (0, "")
    lines = events(out)
    assert lines[1]["event"] == "start"
    assert lines[1]["tasks"] == 8
    assert {line["task"] for line in lines if line["event"] == "end"} == {
        f"hidden={hidden} lr={lr} seed={seed}" for hidden in (4, 8) for lr in (0.01, 0.1) for seed in (0, 1)
    }
    assert lines[-1]["event"] == "finish"
    assert lines[-1]["statuses"] == {"finished": 8}
    saved = json.loads(Path("o/result.json").read_text())
    assert saved["best"] == lines[-1]["best"]
    assert len(list(Path("o/tasks").glob("*/model.safetensors"))) == 8
    assert "hidden=8" in Path("o/report.html").read_text()


def test_a_terminal_gets_a_live_table_and_the_winner(weft, spec, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = weft("run", spec, "--out", "o", *SWEEP)
    assert code == 0, err
    assert "spec: 8 tasks on tiny (60 nodes" in err
    assert "12/12" in err
    assert "96 of 96 task·epochs" in err
    assert "8 tasks: 8 finished" in out
    assert re.search(r"best: \S*hidden=.*val accuracy", out)
    assert "report: o/report.html" in out


def test_the_winner_of_every_graph(weft, spec, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = weft("run", spec, "--out", "o", "--set", 'graph=["tiny", "demo"]', "--set", "train.epochs=2")
    assert code == 0
    assert "2 tasks on 2 graphs" in err
    assert re.search(r"best on tiny: \S*tiny\S* \(val accuracy \d\.\d+", out)
    assert re.search(r"best on demo: \S*demo\S* \(val accuracy \d\.\d+", out)


def test_diverged_members_are_told_and_cost_nobody_else(weft, spec):
    wild = ["--set", "train.optimizer=sgd", "--set", "train.lr=[0.1, 1e30]"]
    code, out, err = weft("run", spec, "--json", *wild)
    assert code == 0
    assert "weft: task 'lr=1e+30'" in err
    assert events(out)[-1]["statuses"] == {"finished": 1, "diverged": 1}
    code, _, err = weft("run", spec, "--set", "train.optimizer=sgd", "--set", "train.lr=[1e30, 1e35]", "--overwrite")
    assert code == 3
    assert "every member of the sweep failed" in err


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_was_ended_continues(weft, spec, number):
    """Killed in the middle, resumed, and the same numbers as without the interruption."""
    arguments = [*SWEEP, "--set", "train.epochs=[40, 240]", "--set", "model.hidden=8"]
    command = [sys.executable, "-c", FREQUENT, "run", str(spec), "--json", "--out", "o", *arguments]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        for line in child.stdout:
            event = json.loads(line)
            if event["event"] == "checkpoint" and event["epoch"] >= 60:
                break
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), err
    reached = read_checkpoint(Path("o/groups/1")).about["epoch"]
    assert 60 <= reached < 240
    code, out, _ = weft("run", spec, "--json", "--out", "o", "--resume", *arguments)
    assert code == 0
    lines = events(out)
    assert any("resumed after epoch" in line.get("message", "") for line in lines)
    assert lines[-1]["statuses"] == {"finished": 8}
    code, out, _ = weft("run", spec, "--out", "whole", *arguments)
    first, second = (json.loads(Path(f"{name}/result.json").read_text())["tasks"] for name in ("o", "whole"))
    timed = ("seconds", "seconds_per_epoch")
    assert [{k: v for k, v in row.items() if k not in timed} for row in first] == [
        {k: v for k, v in row.items() if k not in timed} for row in second
    ]


FREQUENT = """
from dataclasses import replace
import weft.engine.run as train
from weft.cli.main import main
run = train.run
train.run = lambda work, options, **more: run(work, options=replace(options, checkpoint_every=0.0), **more)
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_checkpoint_and_the_command_to_continue(weft, spec, number, code):
    change = "train.epochs=100000"
    command = [sys.executable, "-m", "weft.cli.main", "run", str(spec), "--json", "--out", "my run", "--set", change]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        for line in child.stdout:
            if json.loads(line)["event"] == "progress":
                break
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == code, err
    epoch = read_checkpoint(Path("my run")).about["epoch"]
    last = json.loads(out.splitlines()[-1])
    assert (last["event"], last["task"], last["epoch"]) == ("interrupted", "spec", epoch)
    assert f"interrupted after epoch {epoch}" in err
    resume = shlex.split(err.splitlines()[-1])
    assert resume == ["weft", "run", str(spec), "--out", "my run", "--resume", "--set", change]


@pytest.mark.parametrize("words", [(), ("--progress", "plain")])
def test_a_pipe_gets_lines_of_text_and_a_summary(weft, spec, words):
    code, out, err = weft("run", spec, "--out", "o", "--device", "cpu", *words)
    assert code == 0
    assert "planned: 1 task" in err
    assert re.search(r"spec: finished; val accuracy 0\.\d+, test accuracy 0\.\d+ at epoch \d+", err)
    assert "best epoch" in out
    assert out.endswith("report: o/report.html\n")
    assert "{" not in out + err


def test_a_pipe_gets_the_best_settings_of_a_sweep(weft, spec):
    code, out, err = weft("run", spec, "--out", "o", "--device", "cpu", *SWEEP)
    assert code == 0
    assert re.search(r"^best: hidden=\d lr=0\.\d+ \(val accuracy 0\.\d+ ± 0\.\d+.* over 2 seeds\)", out, re.M)
    best = json.loads(Path("o/result.json").read_text())["best_settings"]
    assert f"best settings {best}" in err
    assert f"best: {best}" in out
    assert "{" not in out + err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--progress", "loud"), "must be one of auto, live, plain, json, none"),
        (("--json", "--progress", "plain"), "one"),
    ],
)
def test_progress_that_there_is_not(weft, spec, words, message):
    code, out, err = weft("run", spec, "--out", "o", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_nothing_is_shown_on_request(weft, spec):
    code, out, err = weft("run", spec, "--out", "o", "--progress", "none")
    assert (code, out, err) == (0, "", "")
