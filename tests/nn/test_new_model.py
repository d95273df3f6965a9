"""A model added by one row of traits and one layer: trained alone, stacked and padded, with nothing else written."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph
from tests.stacks import best_tensors, start
from weft.core.errors import SpecError
from weft.nn import GNN, ModelTraits, register_model
from weft.nn.conv import Conv
from weft.nn.features import transform
from weft.nn.initial import ZEROS, glorot

# ---- the layer file ------------------------------------------------------------------------------------


class HopConv(Conv):
    """``Y = (A_mean X + X) W^T + b``. Shapes: ``X [N, in]``, ``W [out, in]``, ``Y [N, out]``."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.declare("weight", (out_features, in_features), glorot(in_features, out_features))
        self.declare_ends(ZEROS, residual=False)

    def propagate(self, x, adj, first, ending):
        if first is None:
            product = transform(x, self.weight)
            return ending.apply(weft.ops.spmm(adj.mean(), product) + product)
        return ending.linear(first, self.weight)

    def aggregate(self, x, adj):
        return weft.ops.spmm(adj.mean(), x) + x


class Hop(GNN):
    """Layers of HopConv."""

    def __init__(self, in_features, hidden, out_features, layers=2, dropout=0.5, **common):
        def conv(place, inputs, outputs):
            return HopConv(inputs, outputs)

        super().__init__(in_features, hidden, out_features, layers, dropout, conv=conv, **common)


# ---- the row -------------------------------------------------------------------------------------------

HOP = ModelTraits("hop", settings=("hidden", "layers", "dropout", "input_dropout", "norm"))


@pytest.fixture(autouse=True)
def hop():
    with register_model(HOP, Hop):
        yield


def test_it_trains_alone_and_says_what_it_is():
    graph = tiny_graph()
    result = weft.run(weft.Task(graph=graph, model="hop", hidden=8, epochs=20, lr=0.05), device="cpu")
    assert isinstance(result.model, Hop)
    assert result.history["loss"][-1] < 0.8 * result.history["loss"][0]
    assert result.plan.first_layer == "once"
    assert weft.plan(weft.Task(graph=graph, model="hop"), machine="h200").groups[0].cost.total_bytes > 0


@pytest.mark.parametrize("sparse", [False, True])
def test_a_stack_of_it_with_padded_widths_equals_its_members(sparse):
    graph = tiny_graph(sparse=sparse)
    members = [{"hidden": 4, "seed": 1}, {"hidden": 8, "seed": 2, "lr": 0.05}, {"hidden": 8, "dropout": 0.0}]
    tasks = [weft.Task(graph=graph, model="hop", epochs=8, norm="batch", eps=1e-3, **member) for member in members]
    run = start(tasks, graph)
    assert len(run.stacks) == 1, run.notes
    together = run.advance(8)
    for index, task in enumerate(tasks):
        alone = start([task], graph)
        (progress,) = alone.advance(8)
        torch.testing.assert_close(
            torch.tensor(together[index].rows), torch.tensor(progress.rows), rtol=1e-4, atol=1e-5
        )
        for name, value in best_tensors(alone, 0).items():
            torch.testing.assert_close(best_tensors(run, index)[name], value, rtol=1e-4, atol=1e-5)
        assert run.num_parameters(index) == alone.num_parameters(0)


def test_a_sweep_with_a_built_in_model():
    sweep = weft.Sweep(tiny_graph(), model=["gcn", "hop"], hidden=[4, 8], seed=range(2), epochs=3)
    result = weft.run(sweep, device="cpu", progress=False)
    assert result.statuses == {"finished": 8}
    assert any("widths 4, 8" in reason for plan in result.plan for reason in plan.why)


def test_a_setting_that_its_row_does_not_list_is_refused():
    with pytest.raises(SpecError, match="residual=True would have no effect: hop has no residual"):
        weft.run(weft.Task(graph=tiny_graph(), model="hop", residual=True), device="cpu")


def test_what_cannot_be_registered():
    with pytest.raises(SpecError, match="'hop' is taken"), register_model(HOP, Hop):
        pass
    with pytest.raises(SpecError, match=r"must be a subclass of weft\.nn\.GNN"), register_model(HOP, HopConv):
        pass
    with (
        pytest.raises(SpecError, match="lists heads among its settings, but Hop takes hidden"),
        register_model(ModelTraits("more", settings=("hidden", "heads")), Hop),
    ):
        pass
