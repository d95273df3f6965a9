"""``--log`` and the section [run] of a spec: options of a run, which commands read and the shell overrides."""

from __future__ import annotations

import csv
import json
import re

import pytest

from tests.graphs_for_tests import tiny_graph

SPEC = """
graph = "tiny"
[model]
hidden = 8
[train]
epochs = 4
[run]
log = ["csv:a.csv"]
device = "cpu"
checkpoint_every = 7
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """A spec with a section [run], beside a saved graph, in the current folder."""
    monkeypatch.chdir(tmp_path)
    tiny_graph().save(tmp_path / "tiny")
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    return path


def epochs(file):
    with open(file, newline="") as table:
        return [int(row["epoch"]) for row in csv.DictReader(table)]


def test_a_run_logs_where_the_section_says(weft, spec, tmp_path):
    code, _, err = weft("run", spec, "--progress", "none")
    assert (code, err) == (0, "")
    assert epochs(tmp_path / "a.csv") == [1, 2, 3, 4]


def test_the_shell_and_set_replace_what_it_says(weft, spec, tmp_path):
    assert weft("run", spec, "--log", "csv:b.csv", "--log", "csv:c.csv", "--out", "b", "--progress", "none")[0] == 0
    assert weft("run", spec, "--set", 'run.log=["csv:d.csv"]', "--out", "d", "--progress", "none")[0] == 0
    assert [epochs(tmp_path / f"{name}.csv") for name in "bcd"] == [[1, 2, 3, 4]] * 3
    assert not (tmp_path / "a.csv").exists()


def test_stdout_is_for_events_alone(weft, spec):
    code, out, _ = weft("run", spec, "--json", "--log", "logging")
    assert code == 0
    assert [json.loads(line)["event"] for line in out.splitlines()][-1] == "finish"


def test_a_plan_reads_of_it_what_changes_a_plan(weft, spec):
    spec.write_text(SPEC + 'budget = "10KiB"\n')
    code, out, _ = weft("plan", spec)
    assert code == 4, out
    assert weft("plan", spec, "--budget", "4GiB")[0] == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lgo = 3", r"spec\.toml: unknown option 'run\.lgo' \(did you mean 'log'\?\)"),
        ('log = "cvs:a"', r"--log cvs:a \(did you mean 'csv'\?\) must be one of tensorboard:DIR, wandb\[:PROJECT\]"),
        ("ranks = 0", r"--ranks 0 must be at least 1"),
        ("batches = 3", r"unknown option 'run\.batches'"),
    ],
)
def test_mistakes_in_it_are_said_before_anything_is_trained(weft, spec, line, said):
    spec.write_text(re.sub(r"log = .*", line, SPEC))
    code, _, err = weft("run", spec)
    assert code == 2
    assert re.search(said, err), err


def test_a_section_that_is_none_is_said(weft, spec):
    spec.write_text("run = 3\n" + SPEC[: SPEC.index("[run]")])
    code, _, err = weft("run", spec)
    assert (code, "run = 3 must be a section, written [run]" in err) == (2, True)


def test_a_server_is_sent_no_log(weft, spec):
    code, _, err = weft("submit", spec, "--server", "http://127.0.0.1:9", "--set", "run.device=auto")
    assert code == 2
    assert "--log csv:a.csv cannot be submitted" in err
