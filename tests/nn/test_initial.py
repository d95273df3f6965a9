"""Initial weights: PyG's distributions, equal for one seed on any device and in any group."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import nn

from weft.nn import BatchNorm, GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, build, reset_parameters


def bound_of(parameter: torch.Tensor) -> float:
    return float(parameter.detach().abs().max())


def glorot(fan_in: int, fan_out: int) -> float:
    return sqrt(6 / (fan_in + fan_out))


EXPECTED = [
    (lambda: GCNConv(200, 100), {"weight": glorot(200, 100), "bias": 0.0}),
    (lambda: SAGEConv(200, 100), dict.fromkeys(["weight_neighbour", "weight_self", "bias"], 1 / sqrt(200))),
    (
        lambda: GINConv(200, 100),
        {
            "weight_in": 1 / sqrt(200),
            "bias_in": 1 / sqrt(200),
            "weight_out": 1 / sqrt(100),
            "bias": 1 / sqrt(100),
        },
    ),
    (
        lambda: GATConv(200, 128, heads=4),
        {"weight": glorot(200, 128), "attention": glorot(4, 32), "bias": 0.0},
    ),
    (
        lambda: GATv2Conv(200, 128, heads=4),
        {
            "weight_src": glorot(200, 128),
            "bias_src": 1 / sqrt(200),
            "weight_dst": glorot(200, 128),
            "bias_dst": 1 / sqrt(200),
            "attention": glorot(4, 32),
            "bias": 0.0,
        },
    ),
    (lambda: nn.Linear(200, 100), {"weight": 1 / sqrt(200), "bias": 1 / sqrt(200)}),
]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(("make", "bounds"), EXPECTED, ids=lambda v: type(v()).__name__ if callable(v) else "")
def test_distributions_are_pygs(make, bounds: dict[str, float], seeded: bool) -> None:
    module = make()
    if seeded:
        reset_parameters(module, 3)
    found = dict(module.named_parameters())
    assert set(found) == set(bounds)
    for name, bound in bounds.items():
        assert bound_of(found[name]) <= bound * (1 + 1e-6), name
        assert bound_of(found[name]) >= 0.9 * bound, name
        if found[name].numel() > 10000:
            assert found[name].std().item() == pytest.approx(bound / sqrt(3), rel=0.02)


def test_parameters_differ_from_each_other() -> None:
    conv = SAGEConv(8, 8)
    reset_parameters(conv, 0)
    assert not torch.equal(conv.weight_neighbour, conv.weight_self)


def test_torch_and_foreign_modules_are_reset_too() -> None:
    def make() -> nn.Module:
        return nn.Sequential(GCNConv(4, 3), nn.Linear(3, 3), nn.Conv1d(2, 2, 3), nn.BatchNorm1d(3))

    first, second = make(), make()
    state = torch.get_rng_state()
    reset_parameters(first, 9), reset_parameters(second, 9)
    assert torch.equal(state, torch.get_rng_state())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_parameters_nobody_knows_stay() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([3.0]))

    module = Own()
    reset_parameters(module, 0)
    assert module.scale.item() == 3.0


def test_running_statistics_start_afresh() -> None:
    norm = BatchNorm(3)
    norm(torch.randn(10, 3) + 5)
    reset_parameters(norm, 0)
    assert torch.equal(norm.running_mean, torch.zeros(3))


def test_learned_eps_starts_where_it_was_told() -> None:
    model = build("gin", 4, 3, eps=0.25, train_eps=True)
    reset_parameters(model, 0)
    assert [conv.eps.item() for conv in model.convs] == [0.25, 0.25]
