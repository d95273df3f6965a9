"""The hand-written baseline computes what PyG computes, and every baseline's epoch trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.baselines import epochs
from benchmarks.baselines.cusparse import SparseGNN, SparseGraph
from benchmarks.baselines.epochs import Setting, cusparse_epoch, pyg_epoch, pyg_inputs, pyg_model
from weft.graph.generate import citation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
pytest.importorskip("torch_geometric")

SETTING = Setting(layers=3, hidden=8, heads=2)
SURE = replace(SETTING, dropout=0.0, lr=0.03)  # to learn in a few epochs
MODELS = ("gcn", "sage", "gin", "gat")


@pytest.fixture(scope="module")
def graph():
    return citation(60, 300, 12, 3, seed=1)


def weights_like_pyg(name, model, pyg):
    """Copy PyG's weights, layer by layer."""
    for layer, conv in zip(model.layers, pyg.convs, strict=True):
        if name == "gcn":
            pairs = [(layer.linear.weight, conv.lin.weight), (layer.bias, conv.bias)]
        elif name == "sage":
            pairs = [(layer.neighbours.weight, conv.lin_l.weight), (layer.own.weight, conv.lin_r.weight),
                     (layer.own.bias, conv.lin_l.bias)]  # fmt: skip
        elif name == "gin":
            first, second = conv.nn.lins
            pairs = [(layer.first.weight, first.weight), (layer.first.bias, first.bias),
                     (layer.second.weight, second.weight), (layer.second.bias, second.bias)]  # fmt: skip
        else:
            pairs = [(layer.linear.weight, conv.lin.weight), (layer.bias, conv.bias),
                     (layer.source, conv.att_src[0]), (layer.target, conv.att_dst[0])]  # fmt: skip
        for ours, theirs in pairs:
            ours.data.copy_(theirs)


@pytest.mark.parametrize("name", MODELS)
def test_sparse_models_equal_pyg(name, graph):
    torch.manual_seed(0)
    pyg = pyg_model(name, graph, SETTING).eval()
    sizes = [12, SETTING.hidden, SETTING.hidden, 3]
    model = SparseGNN(name, sizes, SETTING.heads, SETTING.dropout).eval()
    weights_like_pyg(name, model, pyg)
    expected = pyg(graph.x, *pyg_inputs(name, graph, graph.edge_index()))
    found = model(graph.x, SparseGraph(name, graph.adj))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (found * direction).sum().backward()
    layer, conv = model.layers[0], pyg.convs[0]
    ours = {"gcn": "linear", "sage": "neighbours", "gin": "first", "gat": "linear"}[name]
    theirs = {"sage": "lin_l", "gin": "nn"}.get(name, "lin")
    theirs = getattr(conv, theirs).lins[0] if name == "gin" else getattr(conv, theirs)
    torch.testing.assert_close(getattr(layer, ours).weight.grad, theirs.weight.grad, rtol=1e-3, atol=1e-5)


@pytest.fixture
def losses(monkeypatch):
    """The loss of every epoch, as the baseline computes it."""
    seen, real = [], epochs.F.cross_entropy
    monkeypatch.setattr(epochs.F, "cross_entropy", lambda *given: (seen.append(real(*given)), seen[-1])[1])
    return seen


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("order", ["source", "destination"])
def test_pyg_epochs_train(name, order, graph, losses):
    epoch = pyg_epoch(name, graph, SURE, order=order)
    for _ in range(30):
        epoch()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_cusparse_epochs_train(name, graph, losses):
    epoch = cusparse_epoch(name, graph, SURE)
    for _ in range(30):
        epoch()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_captured_epochs_train(name, graph):
    """On a CPU the eager step stands in, and says so; it must learn all the same."""
    pyg = epochs.pyg_captured(name, graph, SETTING, compiled=False)
    for whole in (epochs.cusparse_captured(name, graph, SETTING), pyg):
        assert whole.note["captured"] is False
        whole.train()
        whole.eager()


def test_autocast_gives_float32_logits(graph):
    model, call = epochs.pyg_forward("gcn", graph, SETTING, precision="bf16")
    model.eval()
    found = call()
    assert found.dtype == torch.float32
    exact = model(graph.x, *pyg_inputs("gcn", graph, epochs.ordered_edges(graph, "source")))
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.05)
