"""What edges carry reaches models that take it; what is left out on the way is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import GraphError, SpecError
from weft.graph.graph import Graph


def notes_of(graph, **settings) -> list[str]:
    seen: list[str] = []
    listen = lambda event: seen.append(event.data["message"]) if event.kind == "note" else None  # noqa: E731
    task = weft.Task(graph=graph, **{"epochs": 2, **settings})
    weft.run(task, progress=False, device="cpu", on_event=listen)
    return seen


def with_features(directed: bool = True) -> Graph:
    """The tiny graph with two features per edge: source and destination, so that their order shows."""
    tiny = tiny_graph()
    src, dst = tiny.edge_index()
    order = torch.randperm(src.numel(), generator=torch.Generator().manual_seed(0))
    attr = torch.stack([src, dst], 1).float()[order] / 60
    splits = {"train": tiny.train, "val": tiny.val, "test": tiny.test}
    return Graph.from_edges(
        src[order], dst[order], x=tiny.x, y=tiny.y, **splits, edge_attr=attr, directed=directed, name="tiny"
    )


class EdgeNet(nn.Module):
    """Sums messages that depend on features of edges."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.node, self.edge = nn.Linear(in_features, out_features), nn.Linear(2, out_features)

    def forward(self, x, edge_index, edge_attr):
        src, dst = edge_index
        messages = self.node(x)[src] * torch.tanh(self.edge(edge_attr))
        return self.node(x) + torch.zeros(x.shape[0], messages.shape[1]).index_add(0, dst, messages)


def test_edge_features_are_in_the_order_of_the_edges(tmp_path):
    graph = with_features()
    src, dst = graph.edge_index()
    assert torch.allclose(graph.edge_attr * 60, torch.stack([src, dst], 1).float())
    graph.save(tmp_path / "graph")
    assert torch.equal(weft.load(tmp_path / "graph", verify=True).edge_attr, graph.edge_attr)
    back = Graph.from_pyg(graph.to_pyg())
    assert torch.equal(back.edge_attr, graph.edge_attr)
    assert graph.stats().edge_features == 2


def test_merged_edges_have_the_mean_of_their_features():
    graph = Graph.from_edges([0, 1, 0], [1, 0, 2], edge_attr=[[1.0, 0.0], [3.0, 0.0], [5.0, 1.0]], directed=False)
    src, dst = graph.edge_index()
    found = {(int(s), int(d)): row.tolist() for s, d, row in zip(src, dst, graph.edge_attr, strict=True)}
    assert found == {(0, 1): [2, 0], (1, 0): [2, 0], (0, 2): [5, 1], (2, 0): [5, 1]}


def test_a_module_that_names_edge_attr_trains_as_a_plain_loop():
    graph = with_features()
    result = weft.run(weft.Task(graph=graph, model=EdgeNet, epochs=5, lr=0.05), progress=False, device="cpu")
    torch.manual_seed(0)
    net = EdgeNet(graph.num_features, graph.num_classes)
    adam = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(5):
        adam.zero_grad()
        logits = net(graph.x, graph.edge_index(), graph.edge_attr)
        nn.functional.cross_entropy(logits[graph.train], graph.y[graph.train]).backward()
        adam.step()
    logits = net(graph.x, graph.edge_index(), graph.edge_attr)
    expected = nn.functional.cross_entropy(logits[graph.val], graph.y[graph.val]).item()
    assert result.history["val_loss"][-1] == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(result.model(graph.x, graph.adj), result.predict_logits(), atol=1e-6)
    sweep = weft.Sweep(graph, model=EdgeNet, epochs=5, lr=[0.05, 0.01])
    stacked = weft.run(sweep, progress=False, device="cpu")["lr=0.05"]
    assert stacked.history["val_loss"] == pytest.approx(result.history["val_loss"], abs=1e-5)


def test_what_a_model_needs_of_edges_and_does_not_get_is_refused():
    with pytest.raises(SpecError, match=r"of EdgeNet .* needs 'edge_attr': the edges of this graph have none"):
        weft.run(weft.Task(graph=tiny_graph(), model=EdgeNet), progress=False)
    with pytest.raises(GraphError, match="edge_attr has 1 rows but the graph has 2 edges"):
        Graph.from_edges([0, 1], [1, 0], edge_attr=[[1.0]])


@pytest.mark.parametrize("model", ["sage", "gin", "gat"])
def test_models_that_ignore_edge_weights_say_so(model):
    """D4: dropped without a note."""
    heads = {"heads": 2} if model == "gat" else {}
    said = f"{model} does not read the edge weights of graph 'tiny'"
    assert said in notes_of(tiny_graph(weighted=True), model=model, hidden=8, **heads)
    assert said not in notes_of(tiny_graph(), model=model, hidden=8, **heads)


def test_modules_without_the_parameter_say_so_too():
    class Plain(nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.layer = nn.Linear(in_features, out_features)

        def forward(self, x, edge_index):
            return self.layer(x)

    assert "Plain does not read the edge weights of graph 'tiny'" in notes_of(tiny_graph(weighted=True), model=Plain)
    assert "Plain does not read the edge features of graph 'tiny'" in notes_of(with_features(), model=Plain)
    assert "gcn does not read the edge features of graph 'tiny'" in notes_of(with_features(), hidden=4)
    assert notes_of(tiny_graph(weighted=True), hidden=4) == []


def test_wide_edge_attr_of_pyg_is_kept_and_one_column_is_a_weight():
    """D4: wide ``edge_attr`` was left out."""
    data = pytest.importorskip("torch_geometric.data").Data(
        x=torch.ones(3, 1), edge_index=torch.tensor([[2, 0], [1, 1]]), edge_attr=torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    )
    graph = Graph.from_pyg(data)
    assert graph.edge_attr.tolist() == [[3, 4], [1, 2]]
    assert graph.edge_weight is None
    data.edge_attr = data.edge_attr[:, :1]
    graph = Graph.from_pyg(data)
    assert graph.edge_weight.tolist() == [3, 1]
    assert graph.edge_attr.tolist() == [[3], [1]]


def test_masks_of_an_npz_are_splits_and_other_keys_are_named(tmp_path):
    """D4: ``train_mask`` was dropped without a word."""
    mask = np.array([True, False, False])
    arrays = {"src": [0, 1], "dst": [1, 2], "x": np.eye(3), "y": [0, 1, 0]}
    np.savez(tmp_path / "g.npz", **arrays, train_mask=mask, val_mask=np.roll(mask, 1).astype(int), odd=[1])
    graph = weft.load(tmp_path / "g.npz")
    assert (graph.train.tolist(), graph.val.tolist()) == ([0], [1])
    assert graph.notes == ("g.npz: not read: odd",)
    assert "graph 'g': g.npz: not read: odd" in notes_of(graph, hidden=4)
    np.savez(tmp_path / "g.npz", **arrays, train_mask=np.stack([mask, np.roll(mask, 2)], 1))
    assert [weft.load(tmp_path / "g.npz").split(s).train.tolist() for s in (0, 1)] == [[0], [2]]
    np.savez(tmp_path / "g.npz", **arrays, train_mask=[0, 5, 1])
    with pytest.raises(GraphError, match="other numbers than 0 and 1"):
        weft.load(tmp_path / "g.npz")


def test_labels_beyond_reason_are_named():
    """D6: "out of memory; try a smaller hidden"."""
    with pytest.raises(GraphError, match=r"y\[1\] = 2000000000 would make 2,000,000,001 classes for 2 nodes"):
        Graph.from_edges([0], [1], y=[0, 2_000_000_000])
    assert Graph.from_edges([0], [1], y=[0, 60_000]).num_classes == 60_001


def test_a_row_too_few_is_said_of_the_rows():
    """D6: blamed on ``src``."""
    with pytest.raises(
        GraphError, match=r"x has 2 rows, but dst\[1\] = 2 names a node beyond them; give one row per node"
    ):
        Graph.from_edges([0, 1], [1, 2], x=torch.ones(2, 1))
    with pytest.raises(GraphError, match=r"y has 1 rows, but src\[1\] = 1"):
        Graph.from_edges([0, 1], [0, 0], y=[0])


def test_parallel_edges_that_are_merged_are_counted():
    """D6: merged without a word if undirected, kept if directed."""
    merged = Graph.from_edges([0, 0, 1], [1, 1, 2], directed=False)
    assert merged.num_edges == 4
    assert "3 given edges join 2 pairs of nodes" in merged.notes[0]
    assert Graph.from_edges([0, 0, 1], [1, 1, 2]).num_edges == 3
    assert Graph.from_edges([0, 1, 2], [1, 0, 2], directed=False).notes == ()
    assert Graph.from_edges([0, 1], [1, 2], directed=False).notes == ()
    assert merged.to("cpu").random_split(1, 1).notes == merged.notes


def test_a_negative_degree_is_refused_by_gcn_and_nan_in_its_layer():
    """D7: silently 0, where PyG has NaN."""
    splits = {"train": [0], "val": [1]}
    graph = Graph.from_edges([0, 1], [1, 0], x=torch.eye(2), y=[0, 1], edge_weight=[-3.0, 1.0], **splits)
    with pytest.raises(SpecError, match=r"edges into node 1 of graph 'graph' sum to -2 with its self loop"):
        weft.run(weft.Task(graph=graph, hidden=4, epochs=2), progress=False)
    ours = weft.nn.GCNConv(2, 2)
    theirs = pytest.importorskip("torch_geometric.nn").GCNConv(2, 2)
    with torch.no_grad():
        ours.weight.copy_(theirs.lin.weight)
        expected = theirs(graph.x, graph.edge_index(), graph.edge_weight)
        assert torch.allclose(ours(graph.x, graph.adj), expected, equal_nan=True)
    assert expected.isnan().any()
    assert weft.run(weft.Task(graph=graph, model="sage", hidden=4, epochs=2), progress=False).status == "finished"


def test_an_edge_that_is_given_twice_one_way_is_not_taken_for_both_ways():
    twice = Graph.from_edges([0, 0], [1, 1], num_nodes=2, directed=False)
    assert "2 given edges join 1 pairs of nodes" in twice.notes[0]
    both = Graph.from_edges([0, 1, 2], [1, 0, 2], num_nodes=3, directed=False)
    assert both.notes == ()
