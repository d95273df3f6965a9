"""Runs that convert the layers of PyG in a module: the same training, or none converted, and a note says so."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import weft
from weft.core.errors import SpecError
from weft.ops.random_bits import keep_mask_rows
from weft.runtime.modules import convert as converting

pyg = pytest.importorskip("torch_geometric.nn")
EPOCHS = 5


def small(sparse: bool = False, weight: bool = False) -> weft.Graph:
    draw = np.random.default_rng(0)
    src, dst = draw.integers(0, 40, (2, 160))
    x = draw.normal(size=(40, 12)) * (draw.random((40, 12)) < (0.1 if sparse else 1.0))
    options = {"edge_weight": draw.random(160).astype("float32")} if weight else {}
    x = x.astype("float32")
    given = scipy.sparse.csr_matrix(x) if sparse else x
    graph = weft.Graph.from_edges(src, dst, num_nodes=40, x=given, y=draw.integers(0, 3, 40), directed=False, **options)
    return graph.random_split(0.5, 0.25)


GRAPH = small()


class Jumping(nn.Module):
    """Layers of several kinds, one of which Weft has no counterpart for."""

    def __init__(self, i, o):
        super().__init__()
        self.convs = nn.ModuleList([pyg.GCNConv(i, 8), pyg.SAGEConv(8, 8), pyg.GATConv(8, 4, heads=2)])
        self.kept, self.jump, self.last = pyg.TAGConv(8, 8), pyg.JumpingKnowledge("cat"), nn.Linear(32, o)

    def forward(self, x, edge_index):
        found = []
        for conv in (*self.convs, self.kept):
            x = F.dropout(torch.relu(conv(x, edge_index)), 0.3, self.training)
            found.append(x)
        return self.last(self.jump(found))


class Weighted(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.first, self.second = pyg.GCNConv(i, 8), pyg.GraphConv(8, o)

    def forward(self, x, edge_index, edge_weight=None):
        return self.second(torch.relu(self.first(x, edge_index, edge_weight)), edge_index)


class OtherEdges(nn.Module):
    """Its first layer is given the graph's edges, its second other ones."""

    def __init__(self, i, o):
        super().__init__()
        self.first, self.second = pyg.GCNConv(i, 8), pyg.GCNConv(8, o)

    def forward(self, x, edge_index):
        return self.second(torch.relu(self.first(x, edge_index)), edge_index[:, ::2])


class Dropping(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv = pyg.GATConv(i, o, dropout=0.5)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def run(model, graph=GRAPH, seeds=(0,), **settings):
    """The results, and the notes."""
    notes: list[str] = []
    tasks = [weft.Task(graph=graph, model=model, epochs=EPOCHS, seed=s, name=f"s{s}", **settings) for s in seeds]
    on_event = lambda event: notes.append(event.data["message"]) if event.kind == "note" else None  # noqa: E731
    return weft.run(tasks, device="cpu", progress=False, on_event=on_event), notes


@pytest.mark.parametrize("model", [Jumping, Weighted, OtherEdges])
def test_a_converted_run_is_the_run_without(model):
    graph, seeds = small(weight=True), (0, 1)
    (mine, _), (plain, notes) = run(model, graph, seeds), run(model, graph, seeds, convert=False)
    assert not [note for note in notes if "convert" in note]
    for one, other in zip(mine, plain, strict=True):
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=1e-4)
        assert [type(layer) for layer in one.model.modules()] == [type(layer) for layer in other.model.modules()]
        for name, value in other.model.state_dict().items():
            torch.testing.assert_close(one.model.state_dict()[name], value, rtol=1e-2, atol=1e-4)


def test_what_was_converted_is_said_in_note_plan_and_result():
    results, notes = run(Jumping)
    (note,) = [one for one in notes if "convert" in one]
    assert note.startswith("converted: 1 GCNConv and 1 SAGEConv and 1 GATConv of PyG compute with Weft's operators")
    assert "TAGConv has no counterpart" in note
    (result,) = results
    assert sum(note in reason for reason in result.plan.why) >= 1


def test_a_layer_that_is_called_with_other_edges_is_pygs_there():
    (mine,), notes = run(OtherEdges)
    (plain,), _ = run(OtherEdges, convert=False)
    assert any(note.startswith("converted: 2 GCNConv of PyG") for note in notes)
    assert mine.history["loss"] == pytest.approx(plain.history["loss"], rel=1e-4)


class Own(pyg.GCNConv):
    """A subclass, which may do anything."""


class Subclassed(Weighted):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.first = self.second = Own(i, o)

    def forward(self, x, edge_index, edge_weight=None):
        return self.first(x, edge_index)


class Tied(nn.Module):
    """Neighbours tie for the maximum, where PyG divides the gradient in another way."""

    def __init__(self, i, o):
        super().__init__()
        self.enter, self.conv, self.last = nn.Linear(i, 8), pyg.SAGEConv(8, 8, aggr="max"), nn.Linear(8, o)

    def forward(self, x, edge_index):
        return self.last(self.conv(torch.relu(self.enter(x)), edge_index))


class Cached(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv = pyg.GCNConv(i, o, cached=True)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Dropping, "not converted: GATConv: dropout=0.5 of its attention would draw other masks"),
        (Tied, "not converted: SAGEConv: aggr='max' divides the gradient of equal neighbours in another way"),
        (Cached, "cached=True keeps the edges of its first call"),
    ],
)
def test_what_is_not_converted_is_said_with_the_reason(model, words):
    (mine,), notes = run(model)
    (plain,), _ = run(model, convert=False)
    assert any(words in note for note in notes), notes
    assert mine.history["loss"] == plain.history["loss"]


def test_a_subclass_is_not_converted():
    (mine,), notes = run(Subclassed)
    (plain,), _ = run(Subclassed, convert=False)
    assert not any(note.startswith("converted") for note in notes)
    assert mine.history["loss"] == plain.history["loss"]


def test_layers_of_a_version_of_pyg_that_was_not_tested_are_not_converted(monkeypatch):
    monkeypatch.setattr("torch_geometric.__version__", "9.9.0")
    _, notes = run(Weighted)
    assert any("not converted: Weft's layers are tested with PyG" in note and "9.9.0" in note for note in notes), notes


def test_a_module_without_layers_of_pyg_hears_nothing_of_it():
    class Own(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.last = nn.Linear(i, o)

        def forward(self, x):
            return self.last(x)

    assert not [note for note in run(Own)[1] if "convert" in note]


def test_sparse_features_stay_sparse_where_converted_layers_take_them():
    class Direct(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.first, self.second = pyg.GCNConv(i, 8), pyg.GATv2Conv(8, o)

        def forward(self, x, edge_index):
            return self.second(torch.relu(self.first(x, edge_index)), edge_index)

    class Touching(Direct):
        def forward(self, x, edge_index):
            return super().forward(x * 2.0, edge_index)

    graph = small(sparse=True)
    for model, sparse in ((Direct, True), (Touching, False)):
        (mine, notes), (plain, _) = run(model, graph), run(model, graph, convert=False)
        assert any("features stay sparse" in note for note in notes) == sparse
        assert mine[0].history["loss"] == pytest.approx(plain[0].history["loss"], rel=1e-4)


def test_stacked_converted_runs_are_those_alone():
    together, _ = run(Jumping, seeds=(0, 1))
    for seed, one in enumerate(together):
        (alone,), _ = run(Jumping, seeds=(seed,))
        assert one.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-4)
    assert together[0].plan.join == "stacked"


def test_convert_is_refused_where_nothing_reads_it():
    with pytest.raises(SpecError, match="convert=False would have no effect: gcn has no layers of PyG"):
        run("gcn", convert=False)


@pytest.mark.parametrize("model", [Jumping, Weighted, OtherEdges])
def test_a_converted_run_over_sampled_batches_is_the_run_without(model):
    about = {"graph": small(weight=True), "seeds": (0, 1), "mode": "sampled", "batch": 8, "fanout": (3, 3)}
    (mine, notes), (plain, others) = run(model, **about), run(model, **about, convert=False)
    assert [note for note in notes if note.startswith("converted: ") and "GCNConv" in note]
    assert not [note for note in others if "convert" in note]
    for one, other in zip(mine, plain, strict=True):
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=1e-4)
        assert one.history["val_loss"] == pytest.approx(other.history["val_loss"], rel=1e-4)


def test_over_sampled_batches_on_a_gpu_layers_are_left_to_pyg_unless_requested():
    """It decides by the device, not by a clock: two runs of one task have the same bits."""
    model = Weighted(12, 3)
    decided = converting.conversion_of(model, requested=False, sampled_on_gpu=True)
    assert not decided.layers
    assert "over sampled batches PyG's layers are faster (convert=True" in decided.note
    assert converting.conversion_of(model, requested=True, sampled_on_gpu=True).layers


class DropsCoefficients(nn.Module):
    """Attention with dropout between dropout of features, of one kind or the other."""

    def __init__(self, i, o, kind=pyg.GATConv):
        super().__init__()
        self.first, self.second = kind(i, 4, heads=2, dropout=0.5), kind(8, o, heads=2, concat=False, dropout=0.25)

    def forward(self, x, edge_index):
        x = F.dropout(x, 0.1, self.training)
        return self.second(F.dropout(F.elu(self.first(x, edge_index)), 0.2, self.training), edge_index)


class DropsCoefficientsV2(DropsCoefficients):
    def __init__(self, i, o):
        super().__init__(i, o, pyg.GATv2Conv)


def by_hand(layer, x, graph, mask):
    """Attention over all edges and loops; ``mask [E, H]`` of coefficients in the order of Weft's matrix."""
    adj = graph.adj.with_self_loops()
    src, dst = adj.indices.long(), adj.rows().long()
    if isinstance(layer, pyg.GATv2Conv):
        z, q = layer.lin_l(x).view(-1, 2, layer.out_channels), layer.lin_r(x).view(-1, 2, layer.out_channels)
        scores = (F.leaky_relu(z[src] + q[dst], 0.2) * layer.att).sum(-1)
    else:
        z = layer.lin(x).view(-1, 2, layer.out_channels)
        scores = F.leaky_relu((z * layer.att_src).sum(-1)[src] + (z * layer.att_dst).sum(-1)[dst], 0.2)
    exp = (scores - scores.max()).exp()
    alpha = exp / torch.zeros(x.shape[0], 2).index_add(0, dst, exp)[dst] * mask
    out = torch.zeros_like(z).index_add(0, dst, alpha[..., None] * z[src])
    return (out.flatten(1) if layer.concat else out.mean(1)) + layer.bias


@pytest.mark.parametrize("model", [DropsCoefficients, DropsCoefficientsV2])
def test_converted_attention_with_dropout_is_a_plain_loop_with_its_masks(model):
    """Masks are those of (seed, step, site, element), sites in the order of all calls of dropout."""
    torch.manual_seed(3)
    net, graph, losses = model(GRAPH.num_features, GRAPH.num_classes), GRAPH, []
    optimizer, edges = torch.optim.Adam(net.parameters(), lr=0.02), graph.adj.with_self_loops().num_edges
    for step in range(EPOCHS):

        def kept(p, site, rows, columns, step=step):
            mask = keep_mask_rows(torch.tensor(p), torch.tensor([3, step]), site, rows, columns)
            return mask / (1 - p)

        optimizer.zero_grad()
        x = by_hand(net.first, graph.x * kept(0.1, 0, *graph.x.shape), graph, kept(0.5, 1, edges, 2))
        out = by_hand(net.second, F.elu(x) * kept(0.2, 2, *x.shape), graph, kept(0.25, 3, edges, 2))
        losses.append(F.cross_entropy(out[graph.train], graph.y[graph.train]))
        losses[-1].backward()
        optimizer.step()
    (mine,), notes = run(model, seeds=(3,), convert=True, lr=0.02)
    assert mine.history["loss"] == pytest.approx([loss.item() for loss in losses], rel=1e-4)
    (note,) = [one for one in notes if "convert" in one]
    assert "masks of attention are not those of convert=False" in note


def test_attention_with_dropout_is_converted_only_for_who_asks():
    _, notes = run(DropsCoefficients)
    assert any("dropout=0.5 of its attention would draw other masks; convert=True converts it" in n for n in notes)
    together, _ = run(DropsCoefficients, seeds=(0, 1), convert=True)
    assert together[0].plan.join == "stacked"
    for seed, one in enumerate(together):
        (alone,), _ = run(DropsCoefficients, seeds=(seed,), convert=True)
        assert one.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-4)
        assert one.history["val_loss"] == pytest.approx(alone.history["val_loss"], rel=1e-4)
        assert type(one.model.first) is pyg.GATConv
        torch.testing.assert_close(one.model(GRAPH.x, GRAPH.edge_index()), one.predict_logits(), rtol=1e-4, atol=1e-5)


def test_a_plan_says_that_masks_change():
    plan = weft.plan(weft.Task(graph=GRAPH, model=DropsCoefficients, convert=True), machine="h200").plans[0]
    assert any("2 GATConv" in reason and "masks of attention are not those" in reason for reason in plan.why)


def test_who_asks_hears_of_every_layer_that_is_kept():
    class Transformer(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.conv = pyg.TransformerConv(i, o)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    class Plain(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.last = nn.Linear(i, o)

        def forward(self, x):
            return self.last(x)

    assert any("TransformerConv has no counterpart" in note for note in run(Transformer, convert=True)[1])
    assert any("not converted: it has no layers of PyG" in note for note in run(Plain, convert=True)[1])


class OwnLinear(nn.Linear):
    """Weights that are bounded as they are used."""

    def forward(self, x):
        return F.linear(x, self.weight.clamp(-0.45, 0.45), self.bias)


class Later(nn.Module):
    """Changes something of its layer from the third step on."""

    def __init__(self, i, o, conv=pyg.GCNConv, change=None):
        super().__init__()
        self.a, self.b, self.count, self.change = conv(i, 8), pyg.GCNConv(8, o), 0, change

    def forward(self, x, edge_index):
        self.count += self.training
        if self.count == 3 and self.training:
            self.change(self.a)
        return self.b(torch.relu(self.a(x, edge_index)), edge_index)


def sums(layer):
    layer.aggr, layer.aggr_module = "add", pyg.aggr.SumAggregation()


@pytest.mark.parametrize(
    ("conv", "change"),
    [
        (pyg.GATConv, lambda layer: setattr(layer, "negative_slope", 0.9)),
        (pyg.SAGEConv, sums),
        (pyg.GCNConv, lambda layer: setattr(layer, "add_self_loops", False)),
        (pyg.GCNConv, lambda layer: layer.lin.register_forward_hook(lambda module, given, out: out * 0.5)),
        (pyg.GCNConv, lambda layer: prune.l1_unstructured(layer.lin, "weight", 0.5)),
    ],
    ids=["slope", "sum", "loops", "hook", "pruned"],
)
def test_a_layer_that_changes_later_is_pygs_again(conv, change):
    (mine,), notes = run(lambda i, o: Later(i, o, conv, change))
    (plain,), _ = run(lambda i, o: Later(i, o, conv, change), convert=False)
    assert any(note.startswith("converted") for note in notes)
    assert mine.history["loss"] == pytest.approx(plain.history["loss"], rel=1e-4)
    (usual,), _ = run(lambda i, o: Later(i, o, conv, lambda layer: None))
    assert usual.history["loss"] != pytest.approx(plain.history["loss"], rel=1e-3), "the change matters"


def test_a_layer_with_a_linear_map_of_ones_own_is_kept():
    def make(i, o):
        model = Later(i, o, change=lambda layer: None)
        model.a.lin = OwnLinear(i, 8, bias=False)
        return model

    notes = run(make)[1]
    assert any("GCNConv: lin is a OwnLinear that is not PyG's or torch's" in note for note in notes)
