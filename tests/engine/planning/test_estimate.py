"""``weft.estimate``: will it fit?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError


def test_an_estimate_is_the_plan_of_one_training_on_the_whole_graph():
    estimate = weft.estimate("gcn", "shape:ogbn-arxiv", layers=3, hidden=256, machine="h200")
    plan = weft.plan(weft.Task("shape:ogbn-arxiv", layers=3, hidden=256, mode="full"), machine="h200")
    cost = plan.groups[0].cost
    assert (estimate.peak_bytes, estimate.bound_bytes) == (cost.peak_bytes, cost.total_bytes)
    assert estimate.seconds_per_epoch == cost.epoch_seconds
    assert estimate.peak_bytes < estimate.bound_bytes
    assert sum(estimate.breakdown.values()) == estimate.peak_bytes
    assert {"graph", "features", "weights", "gradients", "activations"} <= estimate.breakdown.keys()
    sizes = list(estimate.breakdown.values())
    assert sizes == sorted(sizes, reverse=True)


def test_fits_says_where_and_why():
    estimate = weft.estimate("sage", "shape:ogbn-products", hidden=256, layers=3, machine="h200")
    assert estimate.fits()
    assert "on h200: fits" in str(estimate.fits("h200"))
    small = estimate.fits("t4")
    assert not small
    assert "does not fit" in small.reason
    assert not estimate.fits("h200", budget="2GiB")
    with pytest.raises(SpecError, match="no machine 'a100'; did you mean"):
        estimate.fits("a100")


def test_weights_that_are_larger_than_the_machine_do_not_fit_either():
    estimate = weft.estimate("gcn", "shape:cora", hidden=2_000_000, machine="h200")
    fit = estimate.fits("t4")
    assert not fit
    assert "below the weights and optimizer state" in fit.reason


def test_printed_it_compares_the_named_machines():
    text = str(weft.estimate("gcn", "shape:ogbn-products", hidden=64, machine="a100-40g"))
    assert "features" in text
    rows = {line.split()[0]: line.split()[-1] for line in text.splitlines()[4:]}
    assert next(iter(rows)) == "a100-40g"
    assert rows["h200"] == "yes"
    assert rows["v100-32g"] == "yes"


class Net(nn.Module):
    """PyG's convention, without PyG."""

    def __init__(self, in_features, out_features, hidden=8):
        super().__init__()
        self.first, self.last = nn.Linear(in_features, hidden), nn.Linear(hidden, out_features)

    def forward(self, x, edge_index):
        h = self.first(x).relu()
        return self.last(torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]]))


def test_modules_data_of_pyg_and_optimizers_are_taken_as_they_are():
    pytest.importorskip("torch_geometric")
    graph = tiny_graph()
    model = Net(graph.num_features, graph.num_classes)
    adam = weft.estimate(model, graph.to_pyg(), torch.optim.Adam(model.parameters(), lr=0.1), machine="cpu")
    sgd = weft.estimate(model, graph, torch.optim.SGD(model.parameters(), lr=0.1), machine="cpu")
    by_class = weft.estimate(Net, graph, torch.optim.SGD, hidden=64, machine="cpu")
    assert sgd.peak_bytes < adam.peak_bytes < by_class.peak_bytes


def test_sampled_training_is_estimated_by_its_batches():
    whole = weft.estimate("sage", "shape:ogbn-products", hidden=256, machine="h200")
    sampled = weft.estimate("sage", "shape:ogbn-products", hidden=256, batch=1024, fanout=[15, 10], machine="h200")
    assert sampled.task.sampled
    assert sampled.report.groups[0].cost.training_bytes < whole.peak_bytes


def test_a_loss_of_ones_own_is_an_objective():
    def loss(output, y, rows):
        return nn.functional.cross_entropy(output[rows], y[rows])

    estimate = weft.estimate("gcn", tiny_graph(), loss=loss, machine="cpu")
    assert estimate.task.objective is loss
    assert estimate.fits()
