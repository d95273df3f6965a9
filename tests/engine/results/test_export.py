"""``result.export``: files that other libraries load, with the logits of the training."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import InputError, SpecError

QUIET = {"progress": False, "device": "cpu"}
MODELS = {
    "gcn": {"norm": "batch"},
    "sage": {"norm": "layer", "layers": 3},
    "gin": {},
    "gat": {"heads": 2, "out_heads": 3},
    "gatv2": {"heads": 2, "residual": True},
}


def trained(graph, model="gcn", **settings):
    settings = {"hidden": 8, "epochs": 3, "feature_norm": "row", **settings}
    return weft.run(weft.Task(graph, model=model, **settings), **QUIET)


def inputs_of(graph):
    return graph.x if isinstance(graph.x, torch.Tensor) else graph.x.to_dense(), graph.edge_index()


def other_graph():
    """Of another size than the one trained on."""
    graph = tiny_graph(seed=5)
    keep = torch.arange(40)
    inside = (graph.edge_index() < 40).all(0)
    return graph.x[keep], graph.edge_index()[:, inside]


def test_modules_of_pyg_load_without_weft(tmp_path):
    pytest.importorskip("torch_geometric")
    graph = tiny_graph()
    for model, settings in MODELS.items():
        result = trained(graph, model, **settings)
        result.export("pyg", tmp_path / f"{model}.pt")
        torch.save([*inputs_of(graph), result.predict_logits()], tmp_path / f"{model}.expected")
    code = (
        "import pathlib, sys, torch\n"
        "for file in pathlib.Path(sys.argv[1]).glob('*.pt'):\n"
        "    model = torch.load(file, weights_only=False)\n"
        "    x, edge_index, expected = torch.load(file.with_suffix('.expected'))\n"
        "    with torch.no_grad():\n"
        "        torch.testing.assert_close(model(x, edge_index), expected, atol=1e-5, rtol=1e-5)\n"
        "    print(file.stem)\n"
        "assert not any(name.partition('.')[0] == 'weft' for name in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, tmp_path], check=True, capture_output=True, text=True
    )
    assert set(done.stdout.split()) == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_a_program_of_torch_export_takes_graphs_of_other_sizes(model, tmp_path):
    pytest.importorskip("torch_geometric")
    result = trained(tiny_graph(), model, **MODELS[model])
    program = torch.export.load(result.export("torch-export", tmp_path / "model.pt2")).module()
    for x, edge_index in (inputs_of(tiny_graph()), other_graph()):
        expected = result.predict_logits(weft.Graph.from_edges(*edge_index, x.shape[0], x=x))
        torch.testing.assert_close(program(x, edge_index), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_onnx_computes_the_same(model, tmp_path):
    pytest.importorskip("torch_geometric")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    result = trained(tiny_graph(), model, **MODELS[model])
    session = ReferenceEvaluator(str(result.export("onnx", tmp_path / "model.onnx")))
    for x, edge_index in (inputs_of(tiny_graph()), other_graph()):
        expected = result.predict_logits(weft.Graph.from_edges(*edge_index, x.shape[0], x=x))
        (logits,) = session.run(None, {"x": x.numpy(), "edge_index": edge_index.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-5, rtol=1e-5)


def test_a_gcn_that_was_trained_with_edge_weights_takes_them(tmp_path):
    pytest.importorskip("torch_geometric")
    graph = tiny_graph(weighted=True)
    result = trained(graph)
    program = torch.export.load(result.export("torch-export", tmp_path / "model.pt2")).module()
    logits = program(*inputs_of(graph), graph.edge_weight)
    torch.testing.assert_close(logits, result.predict_logits(), atol=1e-5, rtol=1e-5)


def test_safetensors_have_weights_settings_and_metrics(tmp_path):
    result = trained(tiny_graph(sparse=True))
    with safe_open(result.export("safetensors", tmp_path / "new" / "model.safetensors"), "pt") as file:
        assert set(file.keys()) == set(result.model.state_dict())
        assert torch.equal(file.get_tensor("convs.0.weight"), result.model.convs[0].weight)
        assert json.loads(file.metadata()["task"])["hidden"] == 8
        assert json.loads(file.metadata()["metrics"])["best_epoch"] == result.metrics["best_epoch"]


class Mean(nn.Module):
    """A module in PyG's style."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.lin = nn.Linear(in_features, out_features)

    def forward(self, x, edge_index):
        h = self.lin(x)
        return h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])


class OverWeft(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.conv = weft.nn.GCNConv(in_features, out_features)

    def forward(self, x, adj):
        return self.conv(x, adj)


class OfEdges(nn.Module):
    """Reads types and features of edges."""

    def __init__(self, in_channels, out_channels, num_relations):
        super().__init__()
        self.first, self.last = nn.Linear(in_channels, out_channels), nn.Linear(3, out_channels)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.0, num_relations))

    def forward(self, x, edge_index, edge_type, edge_attr):
        sent = self.first(x)[edge_index[0]] * self.scale[edge_type][:, None] + self.last(edge_attr)
        return torch.zeros_like(self.first(x)).index_add(0, edge_index[1], sent)


class OfNodes(nn.Sequential):
    def __init__(self, in_features, out_features):
        super().__init__(nn.Linear(in_features, out_features))


def with_relations(graph):
    src, dst = graph.edge_index()
    data = {"relation": (src < dst).long(), "edge_attr": torch.rand(graph.num_edges, 3)}
    splits = {"train": graph.train, "val": graph.val, "test": graph.test}
    return weft.Graph.from_edges(src, dst, graph.num_nodes, x=graph.x, y=graph.y, **data, **splits)


@pytest.mark.parametrize("kind", ["pyg", "torch-export", "onnx"])
@pytest.mark.parametrize("model", ["rgcn", OfEdges, OfNodes])
def test_models_that_read_relations_features_of_edges_or_no_edges(model, kind, tmp_path):
    pytest.importorskip("torch_geometric")
    graph = with_relations(tiny_graph())
    settings = {"hidden": 8, "layers": 3, "bases": 1, "norm": "batch"} if model == "rgcn" else {}
    result = weft.run(weft.Task(graph, model=model, epochs=2, feature_norm="row", **settings), **QUIET)
    ending = {"pyg": "pt", "torch-export": "pt2", "onnx": "onnx"}[kind]
    file = result.export(kind, tmp_path / f"model.{ending}")
    inputs = {"x": graph.x, "edge_index": graph.edge_index(), "edge_type": graph.relation.long()}
    inputs["edge_attr"] = graph.edge_attr
    names = {OfNodes: ["x"], OfEdges: [*inputs]}.get(model, ["x", "edge_index", "edge_type"])
    if kind == "onnx":
        pytest.importorskip("onnxscript")
        from onnx.reference import ReferenceEvaluator

        values = {name: inputs[name].numpy() for name in names}
        logits = torch.from_numpy(ReferenceEvaluator(str(file)).run(None, values)[0])
    else:
        loaded = torch.load(file, weights_only=False) if kind == "pyg" else torch.export.load(file).module()
        logits = loaded(*(inputs[name] for name in names))
    torch.testing.assert_close(logits, result.predict_logits(), atol=1e-5, rtol=1e-5)


def test_users_modules_in_pygs_style(tmp_path):
    graph = tiny_graph()
    result = weft.run(weft.Task(graph, model=Mean, epochs=2, feature_norm="row"), **QUIET)
    loaded = torch.load(result.export("pyg", tmp_path / "model.pt"), weights_only=False)
    torch.testing.assert_close(loaded(*inputs_of(graph)), result.predict_logits(), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_exported_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = tiny_graph()
    plain = trained(graph, residual=True)
    over_weft = weft.run(weft.Task(graph, model=OverWeft, epochs=1), **QUIET)
    for result, arguments, told in [
        (plain, ("keras",), "to='keras' must be one of pyg, torch-export, onnx, safetensors"),
        (plain, ("onnx", "model.pt"), "must end in .onnx"),
        (plain, ("pyg",), "residual=True has no counterpart in PyG"),
        (over_weft, ("pyg",), "OverWeft takes Weft's adjacency, not edge_index"),
    ]:
        with pytest.raises(SpecError, match=told):
            result.export(*arguments)
    with pytest.raises(InputError, match=r"out='n+\.pt': cannot be written \(File name too long\)"):
        weft.run(weft.Task(graph, model=Mean, epochs=1), **QUIET).export("pyg", f"{'n' * 300}.pt")
    assert not list(tmp_path.iterdir())
