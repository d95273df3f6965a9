"""Plug-ins: entry points of installed distributions are found by name where Weft's own names end."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import weft
from tests.distributions import install
from tests.graphs_for_tests import tiny_graph
from weft.cli.app import app
from weft.core.errors import InputError, SpecError
from weft.core.plugins import load_plugin, plugin_names

MODEL = """
import weft

class Net(weft.nn.GCN):
    pass

ROW = (weft.nn.ModelTraits("plugged"), Net)
WRONG_ROW = (weft.nn.ModelTraits("plugged_wrong", settings=("hidden", "colour")), Net)

def make(in_features, out_features, hidden=8):
    return weft.nn.GCN(in_features, hidden, out_features)
"""


def test_a_model_with_its_row_is_one_of_wefts_own(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "plugged_models", MODEL, models={"plugged": "ROW"})
    own, plugged = (
        weft.Sweep(tiny_graph(), model=model, hidden=8, epochs=3, seed=[0, 1]) for model in ("gcn", "plugged")
    )
    result = weft.run(plugged, progress=False)
    assert [plan.join for plan in result.plan] == ["stacked"], "planned by its row"
    former = weft.run(own, progress=False)
    assert [member.history["loss"] for member in result] == [member.history["loss"] for member in former]
    with pytest.raises(SpecError, match="plugged has no heads"):
        weft.run(weft.Task(graph=tiny_graph(), model="plugged", heads=2), progress=False)


def test_a_model_that_is_a_callable_is_one_of_the_users_own(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "plugged_callables", MODEL, models={"plugged_made": "make"})
    task = weft.Task(graph=tiny_graph(), model="plugged_made", hidden=4, epochs=3)
    assert task.model == "plugged_callables:make"
    out = tmp_path / "out"
    result = weft.run(task, progress=False, out=out)
    assert result.model.convs[0].weight.shape[0] == 4
    assert weft.read(out).model is not None, "read again by its import path"


def test_a_row_that_does_not_fit_its_class_is_refused(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "plugged_misfits", MODEL, models={"plugged_wrong": "WRONG_ROW", "other": "ROW"})
    with pytest.raises(SpecError, match=r"model='plugged_wrong'.* lists colour among its settings"):
        weft.run(weft.Task(graph=tiny_graph(), model="plugged_wrong"), progress=False)
    with pytest.raises(SpecError, match=r"model='other'.* must be a class or function, or a pair"):
        weft.Task(graph="demo", model="other")


READER = """
import torch, weft

def read(source, directed=True):
    pairs = torch.tensor([int(word) for word in source.read_text().split()]).view(-1, 2)
    return weft.Graph.from_edges(pairs[:, 0], pairs[:, 1], directed=directed, x=torch.eye(3), name="read")

def named(name):
    return weft.load("demo") if name == "team/graph" else None
"""


def test_a_reader_by_the_ending_of_a_file_and_by_name(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "plugged_readers", READER, readers={"pairs": "read", "store": "named"})
    (tmp_path / "g.pairs").write_text("0 1 1 2")
    assert weft.load(tmp_path / "g.pairs").num_edges == 2
    assert weft.load(str(tmp_path / "g.pairs"), directed=False).num_edges == 4
    assert weft.load("store:team/graph").num_nodes == weft.load("demo").num_nodes
    with pytest.raises(InputError, match=r"reader 'store' in weft\.readers returned a NoneType"):
        weft.load("store:nothing")
    (tmp_path / "bad.pairs").write_text("0 one")
    with pytest.raises(
        InputError, match=r"'pairs' in weft.readers \(plugged_readers:read of plugged_readers 1.0\) raised"
    ):
        weft.load(tmp_path / "bad.pairs")
    (tmp_path / "g.unheard").touch()
    with pytest.raises(InputError, match=r"\.unheard is not a known kind of graph file; known are .*\.pairs"):
        weft.load(tmp_path / "g.unheard")


POLICY = """
from weft.sched.baselines import Sequential

class InTurn(Sequential):
    pass

def nothing():
    return 3
"""


def test_a_policy_is_simulated_and_serves(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "plugged_policies", POLICY, policies={"in_turn": "InTurn", "three": "nothing"})

    def simulated(name):
        words = ["queue", "simulate", "--policy", name, "--tasks", "6", "--json"]
        return CliRunner().invoke(app, words, catch_exceptions=False)

    (run,), (own,) = (json.loads(simulated(name).stdout)["simulations"] for name in ("in_turn", "sequential"))
    assert run["policy"] == "in_turn"
    assert run["metrics"] == own["metrics"]
    with pytest.raises(SpecError, match="makes 3, which has no schedule"):
        simulated("three")
    with pytest.raises(SpecError, match=r"there is no policy 'in_turm' \(did you mean 'in_turn'\?\)"):
        simulated("in_turm")


def test_any_object_by_its_name(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "plugged_tuners", "class Greedy: pass", tuners={"greedy": "Greedy"})
    assert plugin_names("tuners") == ("greedy",)
    assert load_plugin("tuners", "greedy").__name__ == "Greedy"
    assert load_plugin("tuners", "other") is None
    assert load_plugin("loggers", "greedy") is None


def test_a_broken_plugin_is_one_sentence(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "plugged_broken", "import no_such_library", models={"plugged_broken": "Net"})
    with pytest.raises(SpecError) as raised:
        weft.Task(graph="demo", model="plugged_broken")
    assert str(raised.value) == (
        "'plugged_broken' in weft.models (plugged_broken:Net of plugged_broken 1.0) raised ModuleNotFoundError: "
        "No module named 'no_such_library'; repair or uninstall plugged_broken"
    )


def test_a_name_that_two_distributions_add_is_refused(tmp_path, monkeypatch):
    for name in ("plugged_first", "plugged_second"):
        (tmp_path / name).mkdir()
        install(tmp_path / name, monkeypatch, name, "class Net: pass", tuners={"same": "Net"})
    with pytest.raises(SpecError, match=r"'same' in weft\.tuners is added by plugged_first and plugged_second"):
        load_plugin("tuners", "same")
