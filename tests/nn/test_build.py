"""Models by name, and the errors for wrong names and options."""

from __future__ import annotations

import pytest
import torch

from tests.nn.examples import NODES, make_example
from weft.core.errors import SpecError
from weft.nn import GAT, GCN, GCNConv, SAGEConv, build
from weft.nn.conv import with_identity, without_weights


@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gat", "gatv2"])
def test_build_by_name(name: str) -> None:
    model = build(name, 7, 3, layers=3, hidden=16, norm="layer", residual=True, activation="elu")
    assert type(model).__name__.lower() == name
    assert len(model.convs) == 3
    assert [conv.out_features for conv in model.convs] == [16, 16, 3]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: build("sagee", 7, 3), "model='sagee' must be one of gcn, sage.*did you mean 'sage'"),
        (lambda: build("gcn", 7, 3, hiden=8), "no option 'hiden'; did you mean 'hidden'"),
        (lambda: build("gcn", 7, 3, heads=8), "no option 'heads'; it takes hidden, layers"),
        (lambda: build("gcn", 7, 3, conv=None), "no option 'conv'"),
        (lambda: build("gcn", 7, 3, hidden=0), "hidden=0 must be a whole number of at least 1"),
        (lambda: build("gcn", 7, 3, layers=2.5), "layers=2.5"),
        (lambda: build("gat", 7, 3, layers="two"), "layers='two'"),
        (lambda: build("gcn", 0, 3), "in_features=0"),
        (lambda: build("gcn", 7, 3, dropout=1.5), "dropout=1.5 must be a number of at least 0 and below 1"),
        (lambda: build("gcn", 7, 3, input_dropout=-1), "input_dropout=-1"),
        (lambda: build("gat", 7, 3, attention_dropout=1), "attention_dropout=1"),
        (lambda: build("gcn", 7, 3, norm="bach"), "norm='bach' must be one of None, 'batch', 'layer'.*'batch'"),
        (lambda: build("sage", 7, 3, aggregator="min"), "aggregator='min'"),
        (lambda: build("gat", 7, 3, hidden=10, heads=4), "hidden=10 must be a multiple of heads=4"),
        (lambda: build("gat", 7, 3, heads=0), "heads=0"),
    ],
)
def test_mistakes_are_named(call, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        call()


def test_one_layer_goes_from_input_to_result(directed) -> None:
    for name in ("gcn", "sage", "gin", "gat", "gatv2"):
        model = build(name, 7, 3, layers=1, hidden=9)
        assert model(torch.randn(NODES, 7), directed.adj).shape == (NODES, 3)


def test_attention_dropout_is_dropout_unless_given() -> None:
    assert [conv.dropout.p for conv in GAT(7, 8, 3, dropout=0.3).convs] == [0.3, 0.3]
    assert [conv.dropout.p for conv in GAT(7, 8, 3, attention_dropout=0.0).convs] == [0.0, 0.0]


def test_a_module_of_ones_own(directed) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = GCNConv(7, 8), SAGEConv(8, 3)

        def forward(self, x, adj):
            return self.two(self.one(x, adj).relu(), adj)

    out = Own()(torch.randn(NODES, 7), directed.adj)
    assert out.shape == (NODES, 3)


def test_aggregating_on_either_side_gives_the_same(graph) -> None:
    x = torch.randn(NODES, 6)
    before, after = GCNConv(6, 5), GCNConv(6, 5, constant_input=True)
    after.load_state_dict(before.state_dict())
    torch.testing.assert_close(before(x, graph.adj), after(x, graph.adj))


@pytest.mark.parametrize("name", ["directed", "symmetric", "empty", "weighted"])
def test_plus_identity(name: str) -> None:
    example = make_example(name)
    dense = torch.zeros(NODES, NODES)
    dense[example.edge_index[1], example.edge_index[0]] = 1.0
    more = with_identity(example.adj)
    found = torch.zeros(NODES, NODES)
    found.index_put_((more.rows().long(), more.indices.long()), torch.ones(more.num_edges), accumulate=True)
    assert torch.equal(found, dense + torch.eye(NODES))
    assert with_identity(example.adj) is more
    assert without_weights(example.adj).weight is None


def test_a_model_prints_what_it_is() -> None:
    text = repr(GCN(7, 8, 3, norm="batch"))
    assert "GCNConv(7, 8)" in text
    assert "BatchNorm(8)" in text
