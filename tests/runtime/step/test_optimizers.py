"""The flat update against torch.optim with the same rates, and schedules at their corners."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from weft.core.task import Task
from weft.runtime.step import optimizers
from weft.runtime.step.forward import Slots, first_layer_prefix, layout_of
from weft.runtime.step.optimizers import SCHEDULES, Optimizer, hyper_table, learning_rates, update_counts
from weft.runtime.step.state import State


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def torch_optimizer(task, model):
    first, rest = list(model[0].parameters()), list(model[2].parameters())
    groups = [
        {"params": first, "weight_decay": task.weight_decay},
        {"params": rest, "weight_decay": task.weight_decay if task.decay == "all" else 0.0},
    ]
    if task.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=task.lr, momentum=task.momentum)
    kind = torch.optim.AdamW if task.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=task.lr, betas=task.betas, eps=task.eps)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("decay", ["all", "first"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_twenty_steps_like_torch(optimizer, decay, schedule):
    task = Task(
        graph="g", optimizer=optimizer, decay=decay, schedule=schedule, lr=0.05, weight_decay=0.1, momentum=0.9,
        epochs=20,
    )  # fmt: skip
    model = two_layers()
    layout = layout_of(model, decay)
    flat = layout.flatten(dict(model.named_parameters()))
    state = State.new([task], flat[None], {}, columns=1)
    mine = Optimizer([task], layout, task.epochs, flat.device)
    theirs = torch_optimizer(task, model)
    for lr in learning_rates(task):
        grads = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = grads[name]
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
        mine.update(state, layout.flatten(grads)[None])
        state.steps.add_(1)
    expected = layout.flatten(dict(model.named_parameters()))
    assert torch.allclose(state.flat[0], expected, atol=2e-6), (state.flat - expected).abs().max()


def test_schedules():
    constant = learning_rates(Task(graph="g", epochs=4, lr=0.1))
    assert constant == [0.1] * 4
    linear = learning_rates(Task(graph="g", epochs=4, lr=1, schedule="linear"))
    assert linear == pytest.approx([1, 0.75, 0.5, 0.25])
    cosine = learning_rates(Task(graph="g", epochs=3, lr=1, schedule="cosine"))
    assert cosine == pytest.approx([1, 0.5 * (1 + math.cos(math.pi / 3)), 0.5 * (1 + math.cos(2 * math.pi / 3))])
    step = learning_rates(Task(graph="g", epochs=8, lr=1, schedule="step"))
    assert step == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    warm = learning_rates(Task(graph="g", epochs=6, lr=1, schedule="linear", warmup=2))
    assert warm == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])


class TestLayout:
    def test_round_trip(self):
        model = two_layers()
        layout = layout_of(model, "all")
        named = layout.named(layout.flatten(dict(model.named_parameters())))
        assert all(torch.equal(named[name], p) for name, p in model.named_parameters())
        assert layout.decay_mask() is None

    def test_first_layer_of_nested_models(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.drop = nn.Dropout()
                self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 1)])

        assert first_layer_prefix(Net()) == "layers.0."
        assert first_layer_prefix(two_layers()) == "0."
        mask = layout_of(Net(), "first").decay_mask()
        assert mask.tolist() == [1.0] * 9 + [0.0] * 4

    def test_frozen_parameters_stay_out(self):
        model = two_layers()
        model[0].requires_grad_(False)
        assert layout_of(model, "all").names == ("2.weight", "2.bias")

    def test_gradients_come_back_flat_and_tied_weights_count_once(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        layout = layout_of(model, "all")
        assert layout.names == ("0.weight", "0.bias", "1.bias")
        slots = Slots(model, layout.names)
        flat = layout.flatten(dict(model.named_parameters())).requires_grad_()
        expected = torch.autograd.grad(model(torch.ones(1, 3)).sum(), list(model.parameters()))
        slots.bind(layout.views(flat))
        (grad,) = torch.autograd.grad(model(torch.ones(1, 3)).sum(), flat)
        assert torch.allclose(grad, torch.cat([g.reshape(-1) for g in expected]))


@pytest.mark.parametrize("beta2", [0.999, 0.99999, 0.99999999])
def test_a_first_step_with_a_beta_close_to_one_is_torchs(beta2):
    task = Task(graph="g", lr=0.01, betas=(0.9, beta2), epochs=1)
    model = nn.Linear(50, 1, bias=False)
    layout, grad = layout_of(model, "all"), torch.randn(50)
    flat = layout.flatten(dict(model.named_parameters()))[None].clone()
    start, leaf = flat.clone(), nn.Parameter(flat[0].clone())
    leaf.grad = grad
    torch.optim.Adam([leaf], lr=0.01, betas=task.betas).step()
    update = Optimizer([task], layout, 1, flat.device)
    update.update(State.new([task], flat, {}, columns=1), grad[None])
    step = leaf.detach() - start[0]
    assert float((flat - start - step).norm() / step.norm()) < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "sgd", "momentum": 0.9},
        {"betas": (0.5, 0.99999999), "schedule": "cosine", "warmup": 3},
        {"optimizer": "adamw", "accumulate": 3, "schedule": "step"},
        {"betas": (0.0, 0.9), "schedule": "plateau", "warmup": 2},
    ],
    ids=str,
)
def test_numbers_of_every_step_are_the_formulas(settings):
    """Powers that round away are not taken: the bits are those of taking them all."""
    steps = 13
    task = Task(graph="g", model="gcn", epochs=60, lr=0.01, **settings)
    beta1, beta2 = (task.momentum, 0.0) if task.optimizer == "sgd" else task.betas
    counts = [max(count, 1) for count in update_counts(task, steps)]
    found = hyper_table(task, steps)
    for column, beta in ((6, beta1), (7, beta2)):
        wanted = torch.tensor([1 - beta**count for count in counts], dtype=torch.float64).float()
        assert torch.equal(found[:, column], wanted)
    rest, rising = (60 - task.warmup) * steps, task.warmup * steps
    wanted = [0.01 * (step + 1) / max(rising, 1) for step in range(rising)]
    wanted += [0.01 * SCHEDULES[task.schedule](step / rest) for step in range(rest)]
    assert torch.equal(found[:, 0], torch.tensor(wanted, dtype=torch.float64).float())


def test_a_plan_makes_no_table(monkeypatch):
    def never(*about):
        raise AssertionError("made")

    monkeypatch.setattr(optimizers, "hyper_table", never)
    task = Task(graph="g", model="gcn", epochs=1_000_000)
    found = optimizers.stacked_table([task, task], 1_000_000, 1000, torch.device("meta"))
    assert found.shape == (2, 1_000_000_000 + optimizers.SPARE, 10)
