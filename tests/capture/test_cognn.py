"""Peaks against an independent estimate: the tensors that Table II of the CoGNN paper says operators allocate.

Its Propagate gathers a row for every edge (ephemeral, NE x FL) and adds them up (output, NN x FL); its Linear has a
weight, an output NN x FL_out, and in the backward pass a weight gradient and a gradient of its input. Sizes are in
float32. Shapes: NN nodes, NE edges, FL features of a layer.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.dry_runs import capture
from tests.graphs_for_tests import PRODUCTS
from weft.core.task import Task
from weft.planner.cost.memory import live_bytes

NN, NE = PRODUCTS.num_nodes, PRODUCTS.num_edges
FLOAT = 4


def peak(widths: list[int], ephemeral: bool) -> int:
    """Visit the operators of a chain of (Propagate, Linear) forward and back, as section IV-C of the paper says."""
    layers = list(pairwise(widths))
    weights = sum(a * b for a, b in layers)
    alive, most = weights, 0
    for layer, (into, out) in enumerate(layers):
        messages = NE * into if ephemeral else 0
        alive += NN * into  # Propagate's output, which Linear_BP needs: it stays
        most = max(most, alive + messages)
        alive -= NN * into if layer else 0  # Propagate's own input goes; the first is the data
        alive += NN * out
        most = max(most, alive)
    alive += NN * widths[-1]  # the gradient of the output
    for layer, (into, out) in reversed(list(enumerate(layers))):
        alive += into * out  # weight gradient
        if layer:
            alive += NN * into
            most = max(most, alive)
            alive -= NN * (out + into)  # the output's gradient and Propagate's output go
            alive += NN * into  # Propagate's backward has an output of its own
            most = max(most, alive + (NE * into if ephemeral else 0))
            alive -= NN * into
    return FLOAT * most


class Chain(nn.Module):
    """Propagate and Linear, as PyG runs them."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

    def forward(self, x, edge_index):
        for layer in self.layers:
            messages = x.index_select(0, edge_index[0])
            rows = edge_index[1][:, None].expand_as(messages)
            x = layer(torch.zeros_like(x).scatter_add_(0, rows, messages))
            del messages, rows
        return x


@pytest.mark.parametrize("layers", [2, 4, 7, 10])
@pytest.mark.parametrize("hidden", [16, 64])
def test_a_chain_of_propagate_and_linear(layers, hidden):
    widths = [PRODUCTS.num_features, *[hidden] * (layers - 1), PRODUCTS.num_classes]
    program = capture(Task(graph="products", model=lambda *_: Chain(widths)), PRODUCTS).program
    ours = max(live_bytes(program)) - program.resident_bytes
    assert ours == pytest.approx(peak(widths, ephemeral=True), rel=0.03)


@pytest.mark.parametrize("layers", [2, 5, 10])
@pytest.mark.parametrize("model", ["gcn", "sage", "gin"])
def test_a_model_without_ephemerals_lies_between_bare_outputs_and_a_gathered_chain(model, layers):
    widths = [PRODUCTS.num_features, *[64] * (layers - 1), PRODUCTS.num_classes]
    program = capture(Task(graph="products", model=model, layers=layers, hidden=64, dropout=0.0), PRODUCTS).program
    ours = max(live_bytes(program)) - program.resident_bytes
    outputs = FLOAT * NN * sum(widths[1:])  # GIN has two Linears a layer, the others one
    assert 0.9 * outputs <= ours + program.bytes_by_kind()["input"]
    assert ours < peak(widths, ephemeral=True)
