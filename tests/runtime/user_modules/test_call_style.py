"""What forward takes decides how a module is called; what Weft cannot give is said with the line before any call."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft.core.errors import SpecError
from weft.runtime.modules.settings import call_style

pyg = pytest.importorskip("torch_geometric.nn")
EPOCHS, RATE = 4, 0.05


def small(weight: bool = False) -> weft.Graph:
    draw = np.random.default_rng(0)
    src, dst = draw.integers(0, 40, (2, 160))
    x, y = draw.normal(size=(40, 6)).astype("float32"), draw.integers(0, 3, 40)
    options = {"edge_weight": draw.random(160).astype("float32")} if weight else {}
    graph = weft.Graph.from_edges(src, dst, num_nodes=40, x=x, y=y, directed=False, name="g", **options)
    return graph.random_split(0.5, 0.25)


GRAPH = small()


class Base(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.first, self.second = pyg.GCNConv(i, 8), pyg.SAGEConv(8, o)

    def both(self, x, edges):
        return self.second(torch.relu(self.first(x, edges)), edges)

    def forward(self, x, edge_index):
        return self.both(x, edge_index)


class TakesData(Base):
    def forward(self, data):
        assert data.num_nodes == 40
        return self.both(data.x, data.edge_index)


class TakesSparse(Base):
    def forward(self, x, adj_t):
        return self.both(x, adj_t)


class NeedsAttributes(Base):
    def forward(self, x, edge_index, edge_attr):
        return self.both(x, edge_index)


class NeedsWeights(Base):
    def forward(self, x, edge_index, edge_weight):
        return self.second(self.first(x, edge_index, edge_weight), edge_index)


class NeedsLayer(Base):
    def forward(self, x, adj, layer):
        return self.both(x, adj)


class NeedsMore(Base):
    def forward(self, x, adj, depth):
        return x


class Doubled(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.double()


class Wrong(Base):
    def forward(self, x, edge_index):
        return self.both(x, edge_index) @ torch.ones(7, 3)


class PartlyCompiled(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.first = torch.compile(self.first)


class CompiledTwice(Base):
    """A compiled part of a compiled part."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.first.lin = torch.compile(self.first.lin)
        self.first = torch.compile(self.first)


def compiled(i, o):
    return torch.compile(Base(i, o))


def compiled_in_place(i, o):
    model = Base(i, o)
    model.compile()
    return model


def run(model, graph=GRAPH, out=None, **settings):
    task = weft.Task(graph=graph, model=model, epochs=EPOCHS, lr=RATE, **settings)
    return weft.run(task, device="cpu", progress=False, out=out)


def plain(model, given, graph=GRAPH):
    """The loop that a user would write."""
    torch.manual_seed(0)
    module, losses = model(6, 3), []
    update = torch.optim.Adam(module.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        update.zero_grad()
        loss = F.cross_entropy(module(*given)[graph.train], graph.y[graph.train])
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def transposed() -> torch.Tensor:
    index = GRAPH.edge_index().flip(0)
    return torch.sparse_coo_tensor(index, torch.ones(index.shape[1]), (40, 40)).coalesce().to_sparse_csr()


@pytest.mark.filterwarnings("ignore")  # torch's own remarks on sparse tensors
@pytest.mark.parametrize("convert", [True, False])
def test_data_and_adj_t_train_as_a_plain_loop(convert):
    from torch_geometric.data import Data

    data = Data(x=GRAPH.x, edge_index=GRAPH.edge_index())
    mine = run(TakesData, convert=convert).history["loss"]
    assert mine == pytest.approx(plain(TakesData, [data]), rel=1e-4)
    mine = run(TakesSparse, convert=convert).history["loss"]
    assert mine == pytest.approx(plain(TakesSparse, [GRAPH.x, transposed()]), rel=1e-4)


@pytest.mark.parametrize("model", [compiled, compiled_in_place, PartlyCompiled, CompiledTwice])
def test_compiled_modules_train_as_written(model, tmp_path):
    result = run(model, out=tmp_path)
    assert result.history["loss"] == run(Base).history["loss"]
    assert any("without torch.compile" in reason for reason in result.plan.why)
    assert isinstance(result.model, Base)
    read = weft.read(tmp_path, model=model, graph=GRAPH)
    assert torch.equal(read.predict(), result.predict())


def test_a_sweep_of_compiled_parts_has_the_numbers_of_each_alone():
    tasks = [weft.Task(graph=GRAPH, model=PartlyCompiled, epochs=EPOCHS, lr=RATE, seed=seed) for seed in range(3)]
    for task, one in zip(tasks, weft.run(tasks, device="cpu", progress=False), strict=True):
        alone = weft.run(task.with_values(model=Base), device="cpu", progress=False)
        assert one.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-6)


def test_required_weights_are_given_where_the_graph_has_them():
    assert run(NeedsWeights, small(weight=True)).status == "finished"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (NeedsAttributes, r"edge_attr\) of NeedsAttributes \(line \d+ of .*call_style.py\) needs 'edge_attr': "),
        (NeedsWeights, "needs 'edge_weight': the edges of this graph have none"),
        (NeedsMore, "needs 'depth': it is called with x and the adjacency"),
        (NeedsLayer, "needs 'layer': it is called with x and the adjacency"),
        (Doubled, r"RuntimeError: .*dtype.* \(line \d+ of .*test_call_style.py\)"),
        (Wrong, r"RuntimeError: mat1 and mat2 .* \(line \d+ of .*test_call_style.py\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_said_in_one_sentence(model, words):
    with pytest.raises(SpecError, match=words) as error:
        run(model)
    assert "\n" not in str(error.value)


def test_styles_by_name():
    class Star(nn.Module):
        def forward(self, x, *rest):
            return x

    class Own(nn.Module):
        def forward(self, x, graph):
            return x

    kinds = {Base: "edges", TakesData: "data", TakesSparse: "transposed"}
    assert {kind: call_style(kind(2, 2)) for kind in kinds} == kinds
    assert call_style(Star()) == "features"
    assert call_style(Own()) == "adjacency"
