"""The flat buffer of parameters, down to parameters without a dimension."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.runtime.step.forward import layout_of


class Scaled(nn.Module):
    """A product times a learned number."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.tensor(1.5)), nn.Linear(in_features, out_features)

    def forward(self, x):
        return self.last(x) * self.scale


def test_a_parameter_without_a_dimension_lies_in_the_buffer():
    model = Scaled(4, 3)
    layout = layout_of(model, "all")
    flat = layout.flatten(dict(model.named_parameters()))
    assert layout.named(flat)["scale"].shape == ()
    assert [tuple(part.shape) for part in layout.copies(torch.stack([flat, flat]))] == [(2,), (2, 3, 4), (2, 3)]


def test_it_trains_alone_and_in_a_stack():
    graph = tiny_graph()
    tasks = [weft.Task(graph=graph, model=Scaled, epochs=6, lr=0.1, seed=seed, name=f"s{seed}") for seed in range(2)]
    together = weft.run(tasks, device="cpu", progress=False)
    assert together.plan[0].join == "stacked"
    for task, one in zip(tasks, together, strict=True):
        alone = weft.run(task, device="cpu", progress=False)
        assert one.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-5)
        assert alone.model.scale.shape == ()
        assert alone.model.scale.item() != 1.5


def test_complex_parameters_come_first_and_stay_views():
    """After three numbers a complex view would be in an odd place."""
    model = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(2, 1, bias=False))
    model[1].turn = nn.Parameter(torch.randn(2, dtype=torch.complex64))
    layout = layout_of(model, "all")
    assert layout.names[0] == "1.turn"
    flat = layout.flatten(dict(model.named_parameters()))
    views = dict(zip(layout.names, layout.views(flat), strict=True))
    views["1.turn"].mul_(2.0)
    assert torch.equal(layout.named(flat)["1.turn"], 2 * model[1].turn.detach())
    rows = torch.stack([flat, flat + 1.0])
    assert rows.shape[1] % 2 == 1
    assert torch.equal(layout.views(rows[1])[0], views["1.turn"] + (1 + 1j))
