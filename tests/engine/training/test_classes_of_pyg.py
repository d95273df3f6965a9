"""Models of PyG given as classes: sizes from the graph, arguments by PyG's names, the numbers of a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError
from weft.core.spec_file import parse_spec

models = pytest.importorskip("torch_geometric.nn")
EPOCHS = 4
PNA = {"aggregators": ["mean", "max"], "scalers": ["identity", "amplification"], "deg": torch.tensor([1, 4, 9, 12, 8])}
CASES = [
    ("GCN", {}),
    ("GCN", {"jk": "cat", "norm": "layer_norm", "improved": True}),
    ("GCN", {"jk": "max", "act": "elu"}),
    ("GCN", {"jk": "lstm"}),
    ("GraphSAGE", {"aggr": "sum"}),
    ("GIN", {"norm": "batch_norm", "train_eps": True}),
    ("GAT", {"heads": 2}),
    ("GAT", {"heads": 2, "v2": True, "jk": "last"}),
    ("PNA", PNA),
    ("EdgeCNN", {}),
]


def run(work, **options):
    return weft.run(work, device="cpu", progress=False, **options)


def plain_loop(name, graph, arguments):
    torch.manual_seed(0)
    net = getattr(models, name)(graph.num_features, 8, 3, out_channels=graph.num_classes, **arguments)
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.02), []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(graph.x, graph.edge_index())[graph.train], graph.y[graph.train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=[f"{name}-{place}" for place, (name, _) in enumerate(CASES)])
def test_a_class_trains_as_in_a_plain_loop(name, arguments):
    graph = tiny_graph()
    sizes = {"hidden_channels": 8, "num_layers": 3, "learning_rate": 0.02}
    result = run(weft.Task(graph, getattr(models, name), **sizes, **arguments, epochs=EPOCHS))
    assert result.history["loss"] == pytest.approx(plain_loop(name, graph, arguments), rel=1e-4)
    assert type(result.model) is getattr(models, name)


def test_arguments_sweep():
    graph = tiny_graph()
    sweep = weft.Sweep(graph, models.GAT, hidden_channels=[8, 16], heads=[1, 4], jk=["cat", None], epochs=1)
    assert sweep.varying == ("hidden", "heads", "model_args.jk")
    result = run(sweep)
    for task, member in zip(sweep, result, strict=True):
        conv = member.model.convs[0]
        assert (conv.heads, conv.heads * conv.out_channels) == (task.heads, task.hidden)
        assert member.model.jk_mode == task.model_args["jk"]
        assert member.history["loss"] == pytest.approx(run(task).history["loss"], rel=1e-4)


def test_in_a_file(tmp_path):
    (tmp_path / "gat.toml").write_text(
        'graph = "demo"\n[model]\nname = "torch_geometric.nn:GAT"\nhidden_channels = [8, 16]\nnum_layers = 2\n'
        'heads = 2\njk = "cat"\n[train]\nepochs = 1\n'
    )
    sweep = weft.read(tmp_path / "gat.toml", overrides=["model.jk=max", "model.act=elu"])
    assert [(task.hidden, task.layers, task.model_args) for task in sweep] == [
        (width, 2, {"jk": "max", "act": "elu"}) for width in (8, 16)
    ]
    assert [member.model.hidden_channels for member in run(sweep)] == [8, 16]
    tables = parse_spec({"graph": "demo", "task": [{"model": "torch_geometric.nn:GCN", "jk": "cat"}, {"seed": 1}]})
    assert [task.model_args for task in tables] == [{"jk": "cat"}, {}]


def test_tasks_and_sweeps_go_through_json():
    task = weft.Task("demo", "torch_geometric.nn:GCN", hidden_channels=8, jk="cat")
    assert weft.Task.from_dict(task.to_dict()) == task
    assert task.with_values(jk="max", lr=0.5).model_args == {"jk": "max"}
    sweep = weft.Sweep("demo", "torch_geometric.nn:GCN", hidden_channels=8, jk=["cat", "max"])
    assert weft.Sweep.from_dict(sweep.to_dict()).tasks() == sweep.tasks()


def test_a_result_is_read_again(tmp_path):
    result = run(weft.Task("demo", "torch_geometric.nn:GCN", hidden_channels=8, jk="cat", epochs=2), out=tmp_path / "a")
    assert torch.equal(weft.read(tmp_path / "a").predict(nodes="test"), result.predict(nodes="test"))


class Own(nn.Module):
    """Of one's own by PyG's names, with relations."""

    def __init__(self, in_channels, hidden_channels, out_channels, num_relations, power=1):
        super().__init__()
        self.first = models.RGCNConv(in_channels, hidden_channels, num_relations)
        self.last, self.power = nn.Linear(hidden_channels, out_channels), power

    def forward(self, x, edge_index, edge_type):
        return self.last(self.first(x, edge_index, edge_type).relu() ** self.power)


def test_a_class_of_ones_own_by_the_same_names():
    result = run(weft.Task(tiny_graph(), Own, hidden_channels=5, power=2, epochs=1))
    assert (result.model.last.in_features, result.model.first.num_relations, result.model.power) == (5, 4, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"hiden_channels": 8},
            r"it has no argument 'hiden_channels' \(did you mean 'hidden_channels'\?\); it has hid",
        ),
        ({"epohcs": 8}, r"no argument 'epohcs' \(did you mean 'epochs'"),
        ({"bases": 8}, r"it has no argument 'bases'.*; it has hidden_channels, num_layers, .*jk, improved"),
        ({"hidden": 8, "model_args": {"hidden_channels": 4}}, "hidden=8 is hidden_channels of the model; give it once"),
    ],
)
def test_arguments_that_it_does_not_have(settings, words):
    for work in (
        weft.Task(tiny_graph(), models.GCN, **settings),
        weft.Task("demo", "torch_geometric.nn:GCN", **settings),
    ):
        for refuse in (run, weft.plan):
            with pytest.raises(SpecError, match=words):
                refuse(work)


def test_arguments_that_are_refused_at_once():
    with pytest.raises(SpecError, match=r"unknown setting 'pover'; docs|unknown setting 'pover'; did you mean"):
        weft.Task("demo", Own, pover=2)
    with pytest.raises(SpecError, match="task: power is given by itself and in model_args; give it once"):
        weft.Task("demo", Own, power=2, model_args={"power": 3})
    for model in ("gcn", nn.Linear(3, 3)):
        with pytest.raises(SpecError, match="unknown setting 'jk'"):
            weft.Task("demo", model, jk="cat")
    with pytest.raises(SpecError, match="norm='batch_norm' must be one of batch, layer"):
        weft.Task("demo", norm="batch_norm")
