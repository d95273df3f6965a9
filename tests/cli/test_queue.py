"""``weft queue simulate`` as a user meets it: words, JSON, a plot, and one sentence for a mistake."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def test_all_policies(weft):
    code, out, err = weft("queue", "simulate", "--tasks", 30)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "30 tasks, budget 26.0 GiB"
    assert lines[1].split()[:2] == ["policy", "makespan"]
    assert [line.split()[0] for line in lines[2:]] == [
        "sequential", "mps", "pipeswitch", "base", "lmcf", "bmc", "backfill",
    ]  # fmt: skip


def test_the_same_seed_gives_the_same_figures(weft):
    calls = [weft("queue", "simulate", "--tasks", 20, "--seed", seed, "--policy", "backfill") for seed in (1, 1, 2)]
    assert calls[0] == calls[1] != calls[2]


def test_json(weft):
    code, out, _ = weft("queue", "simulate", "--queue", "mix", "--policy", "LMCF", "--policy", "bmc", "--json")
    assert code == 0
    runs = json.loads(out)["simulations"]
    assert [run["policy"] for run in runs] == ["lmcf", "bmc"]
    assert runs[0]["metrics"]["tasks"] == 20
    assert runs[0]["metrics"]["peak_bytes"] <= 26 << 30
    assert sum(len(group["members"]) for group in runs[0]["groups"]) == 20


def test_plot(weft, here):
    assert weft("queue", "simulate", "--tasks", 10, "--workers", 3, "--plot", "out/gantt.svg")[0] == 0
    assert ElementTree.parse(here / "out" / "gantt.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "lmfc"], "there is no policy 'lmfc' (did you mean 'lmcf'?); choose one of"),
        (["--queue", "all"], "there is no queue 'all'"),
        (["--tasks", "0"], "tasks=0 must be at least 1"),
        (["--workers", "0"], "workers=0 must be at least 1"),
        (["--budget", "much"], "budget='much' is not an amount of memory"),
        (["--machine", "v10"], "there is no machine 'v10'"),
        (["--plot", "gantt.png"], "--plot gantt.png: the name must end in .svg"),
        (["--file", "none.json"], "none.json: is not a recorded queue"),
        (["--file", "none.json", "--queue", "mix"], "give one of them"),
        (["--gap", "-1"], "--gap -1.0 must be a number of seconds"),
    ],
)
def test_mistakes_are_one_sentence(weft, arguments, message):
    code, out, err = weft("queue", "simulate", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_help_names_the_command(weft):
    code, out, _ = weft("queue", "--help")
    assert code == 0
    assert "simulate" in out


def test_without_a_command_it_lists_the_tasks_of_a_server(weft, monkeypatch):
    monkeypatch.setenv("WEFT_SERVER", "http://127.0.0.1:9")
    code, _, err = weft("queue")
    assert code == 1
    assert "http://127.0.0.1:9" in err
