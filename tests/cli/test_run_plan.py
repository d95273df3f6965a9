"""``weft plan SPEC --out FILE.json`` and ``weft run FILE.json`` as a user meets them."""

from __future__ import annotations

import json

import pytest

from tests.graphs_for_tests import tiny_graph

SPEC = """
graph = "tiny"
seed = [0, 1]
[model]
name = "gcn"
hidden = 8
[train]
epochs = 5
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The current folder: a spec beside a saved graph."""
    monkeypatch.chdir(tmp_path)
    tiny_graph().save(tmp_path / "tiny")
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def one_sentence(err: str) -> str:
    assert err.startswith("weft: error: ")
    assert len(err.splitlines()) == 1
    return err


def test_planned_run_and_resumed(weft, here):
    code, out, err = weft("plan", "spec.toml", "--machine", "cpu", "--out", "plans/p.json")
    assert code == 0
    assert out.startswith("spec: 2 tasks in 1 group")
    assert err == "run it as planned with: weft run plans/p.json\n"
    code, out, err = weft("run", "plans/p.json", "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["statuses"] == {"finished": 2}
    planned = json.loads((here / "plans" / "p.json").read_text())
    kept = json.loads((here / "runs" / "p" / "sweep.json").read_text())
    assert [one["plan"]["members"] for one in kept["groups"]] == [
        group["plan"]["members"] for group in planned["groups"]
    ]
    before = json.loads((here / "runs" / "p" / "result.json").read_text())["best"]
    code, out, _ = weft("run", "plans/p.json", "--resume", "--json")
    assert code == 0
    assert json.loads((here / "runs" / "p" / "result.json").read_text())["best"] == before
    assert "starting afresh" not in out


def test_a_plan_of_one_task(weft, here):
    assert weft("plan", "spec.toml", "--set", "seed=3", "--machine", "cpu", "--out", "one.json")[0] == 0
    code, _, _ = weft("run", "one.json", "--out", "single")
    assert code == 0
    assert json.loads((here / "single" / "result.json").read_text())["task"]["seed"] == 3


def test_json_and_a_file(weft, here):
    code, out, _ = weft("plan", "spec.toml", "--machine", "cpu", "--json", "--out", "p.json")
    assert code == 0
    assert json.loads(out) == json.loads((here / "p.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["p.json", "--set", "train.lr=0.5"], "--set train.lr=0.5: p.json is a plan, which is run as it is"),
        (["p.json", "--weave", "off"], "--weave off: p.json is a plan, which is run as it is"),
        (["p.json", "--compile"], "--compile: p.json is a plan, which is run as it is"),
        (["gpu.json"], "is for a cuda device (h200), but there is none here"),
        (["lost.json"], "plan 'lost.json': no such file"),
        (["machine.json"], "machine.json: not a plan"),
        (["edited.json"], "edited.json: settings or groups were changed after it was planned"),
    ],
)
def test_refusals_exit_with_2_in_one_sentence(weft, here, arguments, message):
    weft("plan", "spec.toml", "--machine", "cpu", "--out", "p.json")
    weft("plan", "spec.toml", "--machine", "h200", "--out", "gpu.json")
    (here / "machine.json").write_text('{"name": "lab"}')
    edited = (here / "p.json").read_text().replace('"hidden": 8', '"hidden": 16')
    (here / "edited.json").write_text(edited)
    code, out, err = weft("run", *arguments)
    assert (code, out) == (2, "")
    assert message in one_sentence(err)
    assert not (here / "runs").exists()


def test_another_graph_exits_with_2(weft, here):
    weft("plan", "spec.toml", "--machine", "cpu", "--out", "p.json")
    tiny_graph(seed=7).save(here / "tiny", overwrite=True)
    code, _, err = weft("run", "p.json")
    assert code == 2
    assert "graph 'tiny' had 60 nodes" in one_sentence(err)


def test_what_does_not_fit_exits_with_4(weft):
    weft("plan", "spec.toml", "--machine", "cpu", "--out", "p.json")
    code, _, err = weft("run", "p.json", "--budget", "20KiB")
    assert code == 4
    assert "needs" in one_sentence(err)
    code, _, err = weft("plan", "spec.toml", "--machine", "cpu", "--budget", "12KiB", "--out", "tight.json")
    assert code == 4
    assert err == ""  # nothing to run
    code, _, err = weft("run", "tight.json")
    assert code == 4
    assert "does not fit" in one_sentence(err)


@pytest.mark.parametrize(("place", "message"), [("p.toml", "must end in .json"), ("d.json", "is a folder")])
def test_places_that_cannot_be(weft, here, place, message):
    (here / "d.json").mkdir()
    code, out, err = weft("plan", "spec.toml", "--machine", "cpu", "--out", place)
    assert (code, out) == (2, "")
    assert message in one_sentence(err)
