"""Results out of folders: in a fresh process they predict the same bits, and other code or weights are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.utils import parametrizations, prune

import weft
from tests.engine.results.net_for_tests import Net
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import InputError, SpecError

NET = Path(__file__).with_name("net_for_tests.py")
FRESH = """
import sys, torch, weft
run, member, out = sys.argv[1:]
result = weft.read(run)
result = result[member] if member else result
torch.save([result.predict_logits(), result.predict_proba(nodes="test"), result.metrics, result.history], out)
"""


@pytest.fixture
def saved(tmp_path):
    """A graph in a folder, which a fresh process finds again by its path."""
    graph = tiny_graph(sparse=True)
    graph.save(tmp_path / "graph")
    return str(tmp_path / "graph")


def fresh(run: Path, member: str, out: Path):
    """What a new process makes of a folder."""
    env = os.environ | {"PYTHONPATH": str(Path(weft.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", FRESH, str(run), member, str(out)], check=True, timeout=120, env=env)
    return torch.load(out)


def same(one, other) -> bool:
    """Equal numbers, NaN for NaN."""
    return json.dumps(one) == json.dumps(other)


def test_a_run_loaded_in_a_fresh_process_predicts_the_same_bits(saved, tmp_path):
    shutil.copy(NET, tmp_path / "net.py")
    model = f"{tmp_path / 'net.py'}:Net"
    task = weft.Task(graph=saved, model=model, hidden=6, feature_norm="row", epochs=5, eval_every=2)
    result = weft.run(task, out=tmp_path / "run", progress=False, device="cpu")
    logits, test, metrics, history = fresh(tmp_path / "run", "", tmp_path / "out.pt")
    assert torch.equal(logits, result.predict_logits())
    assert torch.equal(test, result.predict_proba(nodes="test"))
    assert same(metrics, result.metrics)
    assert same(history, result.history)


def test_a_sweep_loaded_in_a_fresh_process_predicts_the_same_bits(saved, tmp_path):
    sweep = weft.Sweep(saved, hidden=[4, 8], seed=[0, 1], epochs=4, feature_norm="row")
    result = weft.run(sweep, out=tmp_path / "run", progress=False, device="cpu")
    name = "hidden=4 seed=1"
    logits, *_ = fresh(tmp_path / "run", name, tmp_path / "out.pt")
    assert torch.equal(logits, result[name].predict_logits())
    loaded = weft.read(tmp_path / "run")
    assert loaded.sweep == sweep
    assert loaded.to_dicts() == result.to_dicts()
    assert loaded.best().name == result.best().name
    assert loaded.settings_table() == result.settings_table()
    assert loaded.graphs == result.graphs


def test_models_and_graphs_given_as_objects_are_given_again(tmp_path):
    class Local(Net):
        """Nobody can import it."""

    graph = tiny_graph()
    result = weft.run(weft.Task(graph=graph, model=Local, epochs=3), out=tmp_path, progress=False, device="cpu")
    with pytest.raises(SpecError, match=r"given as an object; give it again: weft.read\(folder, model=Local\)"):
        weft.read(tmp_path)
    loaded = weft.read(tmp_path, model=Local)
    with pytest.raises(SpecError, match="trained on a graph that was given as an object, <tiny>; give graph="):
        loaded.predict()
    assert torch.equal(loaded.predict_logits(graph), result.predict_logits())
    again = weft.read(tmp_path, model={"Local": Local}, graph={"tiny": graph})
    assert torch.equal(again.predict(), result.predict())


def test_a_class_that_can_be_imported_is_found_again(saved, tmp_path):
    """As PyG's are, so that `weft export` and `weft predict` need nothing but the folder."""
    model = pytest.importorskip("torch_geometric.nn").GCN
    task = weft.Task(graph=saved, model=model, hidden_channels=8, num_layers=2, epochs=3)
    result = weft.run(task, out=tmp_path / "run", progress=False, device="cpu")
    logits, *_ = fresh(tmp_path / "run", "", tmp_path / "out.pt")
    assert torch.equal(logits, result.predict_logits())


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize("change", [pruned, parametrizations.weight_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("seeds", [[0], [0, 1]])
def test_pruned_and_parametrized_layers_of_pyg_are_read_again(change, seeds, tmp_path):
    """PyG's Linear lists its weight in its state, even if that is made of other parameters."""
    layers = pytest.importorskip("torch_geometric.nn")

    class Changed(nn.Module):
        def __init__(self, features, classes):
            super().__init__()
            self.first, self.second = layers.GCNConv(features, 6), layers.SAGEConv(6, classes)
            change(self.first.lin)
            change(self.second.lin_l)

        def forward(self, x, edge_index):
            return self.second(self.first(x, edge_index).relu(), edge_index)

    graph = tiny_graph()
    sweep = weft.Sweep(graph, Changed, epochs=4, lr=0.05, seed=seeds)
    trained = weft.run(sweep, out=tmp_path / "run", progress=False, device="cpu")
    loaded = weft.read(tmp_path / "run", model=Changed, graph=graph)
    for before, after in zip(trained, loaded, strict=True):
        assert torch.equal(before.predict_logits(), after.predict_logits())


def test_code_that_has_changed_is_refused(saved, tmp_path):
    shutil.copy(NET, tmp_path / "net.py")
    task = weft.Task(graph=saved, model=f"{tmp_path / 'net.py'}:Net", epochs=2)
    result = weft.run(task, out=tmp_path / "run", progress=False, device="cpu")
    (tmp_path / "net.py").write_text(NET.read_text().replace("torch.relu", "torch.tanh"))
    with pytest.raises(SpecError, match=r"net\.py has changed since"):
        weft.read(tmp_path / "run").predict()
    loaded = weft.read(tmp_path / "run", model=Net)
    assert torch.equal(loaded.predict_logits(), result.predict_logits())


def test_weights_of_another_model_and_another_graph_are_refused(saved, tmp_path):
    weft.run(weft.Task(graph=saved, hidden=4, epochs=2), out=tmp_path / "run", progress=False, device="cpu")
    about = json.loads((tmp_path / "run" / "result.json").read_text())
    about["task"]["hidden"] = 5
    (tmp_path / "run" / "result.json").write_text(json.dumps(about))
    with pytest.raises(SpecError, match="holds the weights of another gcn than there is now: size mismatch"):
        weft.read(tmp_path / "run").predict()
    about["task"]["hidden"] = 4
    (tmp_path / "run" / "result.json").write_text(json.dumps(about))
    weft.Graph.from_edges([0], [1], x=torch.ones(2, 9), y=[0, 1], train=[0]).save(saved, overwrite=True)
    with pytest.raises(SpecError, match=r"had 60 nodes, .* when it was trained on, and has 2 nodes"):
        weft.read(tmp_path / "run").predict()


def test_what_is_no_folder_of_a_run_is_one_sentence(tmp_path):
    with pytest.raises(SpecError, match="does not exist"):
        weft.read(tmp_path / "nowhere")
    with pytest.raises(SpecError, match="is no folder of a run"):
        weft.read(tmp_path)
    (tmp_path / "result.json").write_text('{"task": {}}')
    with pytest.raises(SpecError, match="lacks or garbles an entry"):
        weft.read(tmp_path)
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(SpecError, match="cannot be read"):
        weft.read(tmp_path)


@pytest.mark.parametrize("written", [2, "1"])
def test_a_result_of_a_later_format_is_refused_in_one_sentence(tmp_path, written):
    task = weft.Task(graph="demo", hidden=4, epochs=1)
    weft.run(task, device="cpu", progress=False).save(tmp_path / "run")
    file = tmp_path / "run" / "result.json"
    data = json.loads(file.read_text())
    assert data["format"] == 1
    file.write_text(json.dumps({**data, "format": written}))
    with pytest.raises(SpecError, match=f"has format {written!r}, and this version of Weft reads up to 1; update Weft"):
        weft.read(tmp_path / "run")
    file.write_text(json.dumps({key: value for key, value in data.items() if key != "format"}))
    assert weft.read(tmp_path / "run").status == "finished"


def test_members_that_failed_are_there_without_a_model(saved, tmp_path):
    sweep = weft.Sweep(saved, tasks=[{"lr": 0.01}, {"lr": 1e30}], epochs=4)
    weft.run(sweep, out=tmp_path / "run", progress=False, device="cpu")
    loaded = weft.read(tmp_path / "run")
    assert [member.status for member in loaded] == ["finished", "diverged"]


def test_numbers_to_predict_have_a_column_each(tmp_path):
    from weft.cli.predict import write_csv

    with (tmp_path / "p.csv").open("wb") as file:
        write_csv(file, np.arange(2), np.array([[0.5, 1.0], [2.0, -3.0]], dtype="float32"), "classes")
    assert (tmp_path / "p.csv").read_text() == "node,value_0,value_1\n0,0.5,1\n1,2,-3\n"


def test_predicting_from_a_shell(saved, tmp_path, monkeypatch, capsys):
    from weft.cli.main import main

    sweep = weft.Sweep(saved, hidden=[4, 8], epochs=4)
    result = weft.run(sweep, out=tmp_path / "run", progress=False, device="cpu")
    graph = weft.load(saved)

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["weft", "predict", *words])
        with pytest.raises(SystemExit) as leaving:
            main()
        told = capsys.readouterr()
        return leaving.value.code or 0, told.out + told.err

    run, npy, csv = str(tmp_path / "run"), str(tmp_path / "p.npy"), str(tmp_path / "deep" / "p.csv")
    assert call(run, "--out", npy, "--device", "cpu")[0] == 0
    assert np.array_equal(np.load(npy), result.best().predict().numpy())
    assert call(run, saved, "--out", csv, "--what", "proba", "--member", "hidden=4", "--nodes", "test")[0] == 0
    table = np.loadtxt(csv, delimiter=",", skiprows=1)
    assert table[:, 0].astype(int).tolist() == graph.test.tolist()
    expected = result["hidden=4"].predict_proba(nodes="test").numpy()
    assert np.array_equal(table[:, 1:].astype(np.float32), expected)
    assert Path(csv).read_text().startswith("node,class_0,class_1,class_2\n")
    assert call(run, "--out", csv, "--layerwise")[0] == 0
    assert Path(csv).read_text().splitlines()[1].count(",") == 1
    for words, sentence in {
        ("--out", "x.txt"): "must end in .npy or .csv",
        ("--what", "odds"): "must be one of classes, proba, logits",
        ("--member", "hidden=5"): "no member 'hidden=5'",
        ("nowhere.npz",): "does not exist",
    }.items():
        code, told = call(run, *words)
        assert code == 2, told
        assert sentence in told
        assert "Traceback" not in told


def test_a_result_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    result = weft.run(weft.Task(graph="demo", epochs=1), device="cpu", progress=False)

    def full(*about):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("weft.engine.result.save_atomically", full)
    with pytest.raises(InputError, match=r"^cannot write to .*/q: No space left on device$"):
        result.save(tmp_path / "q")
