"""A module that is given as an object: what its copy keeps, and what is refused because a copy cannot have it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft.core.errors import SpecError, WeftError
from weft.runtime.modules.build import copy_module, functions_that_hold

from .test_exact import GRAPH

EPOCHS = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(GRAPH.num_features, 8), nn.Linear(8, GRAPH.num_classes)

    def forward(self, x, edge_index):
        return self.b(torch.relu(self.a(x)))


def of_torch(model, optimizer=torch.optim.Adam):
    """Losses of a plain loop."""
    update, losses = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05), []
    model.train()
    for _ in range(EPOCHS):
        update.zero_grad()
        loss = F.cross_entropy(model(GRAPH.x, None)[GRAPH.train], GRAPH.y[GRAPH.train])
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def of_weft(model, **settings):
    about = {"epochs": EPOCHS, "lr": 0.05, "weight_decay": 0.0, **settings}
    return weft.run(weft.Task(graph=GRAPH, model=model, **about), device="cpu", progress=False).history["loss"]


def flipped(model):
    model.b.weight.register_hook(lambda gradient: -gradient)
    return model


def flipped_later(model):
    def flip(parameter):
        parameter.grad = -parameter.grad

    model.b.weight.register_post_accumulate_grad_hook(flip)
    return model


@pytest.mark.parametrize("hooked", [flipped, flipped_later])
def test_hooks_on_parameters_are_kept(hooked):
    assert of_weft(hooked(Net())) == pytest.approx(of_torch(hooked(Net())), rel=1e-4)
    assert of_weft(Net()) != pytest.approx(of_torch(hooked(Net())), rel=1e-2), "the hook matters"


def halved(model):
    forward = model.a.forward
    model.a.forward = lambda x: forward(x) * 0.5
    return model


def reads_weight(model):
    weight = model.a.weight
    model.b.register_forward_hook(lambda module, given, out: out + weight.sum())
    return model


def by_default(model):
    model.a.forward = lambda x, layer=model.a: F.linear(x, layer.weight, layer.bias)
    return model


@pytest.mark.parametrize("change", [halved, reads_weight, by_default])
def test_functions_that_hold_parts_of_it_are_refused(change):
    with pytest.raises(SpecError, match=r"given as an object.*refers to parts of it; give the class"):
        of_weft(change(Net()))
    assert of_weft(lambda i, o: change(Net())) == pytest.approx(of_torch(change(Net())), rel=1e-4)


def test_functions_that_hold_nothing_of_it_are_fine():
    model, seen = Net(), []
    model.a.register_forward_hook(lambda module, given, out: seen.append(1))
    assert functions_that_hold(model) == []
    assert of_weft(model) == pytest.approx(of_torch(Net()), rel=1e-4)


def test_what_cannot_be_copied_is_named():
    model = Net()
    model.numbers = (number for number in range(3))
    assert copy_module(model)[1] == ["numbers"]
    with pytest.raises(SpecError, match="numbers cannot be copied; give the class"):
        of_weft(model)


# ---- modes -------------------------------------------------------------------------------------------


class FrozenNorm(Net):
    """Batch norm that stays in evaluation mode, by a method of the instance."""

    def __init__(self, i=0, o=0):
        super().__init__()
        self.norm = nn.BatchNorm1d(8).eval()
        self.norm.train = lambda mode=True: None

    def forward(self, x, edge_index):
        return self.b(torch.relu(self.norm(self.a(x))))


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x if self.training else x


class AddedLater(Net):
    def __init__(self, i=0, o=0):
        super().__init__()
        self.count, self.last = 0, nn.Identity()

    def forward(self, x, edge_index):
        self.count += self.training
        if self.count == 3 and self.training:
            self.last = Doubling()
        return self.last(super().forward(x, edge_index))


def test_a_mode_that_a_module_refuses():
    assert of_weft(FrozenNorm) == pytest.approx(of_torch(FrozenNorm()), rel=1e-4)


def test_modules_that_come_later_have_the_mode_of_the_others():
    result = weft.run(weft.Task(graph=GRAPH, model=AddedLater, epochs=EPOCHS, lr=0.05), device="cpu", progress=False)
    model = AddedLater()
    update = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(EPOCHS):
        model.train()
        update.zero_grad()
        F.cross_entropy(model(GRAPH.x, None)[GRAPH.train], GRAPH.y[GRAPH.train]).backward()
        update.step()
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(GRAPH.x, None)[GRAPH.val], GRAPH.y[GRAPH.val])
        assert result.history["val_loss"][epoch] == pytest.approx(loss.item(), rel=1e-3)


# ---- what changes in training ------------------------------------------------------------------------


class Thaws(Net):
    def __init__(self, i=0, o=0):
        super().__init__()
        self.count = 0
        self.a.requires_grad_(False)

    def forward(self, x, edge_index):
        self.count += self.training
        self.a.requires_grad_(self.count > 3)
        return super().forward(x, edge_index)


class Averages(Net):
    """A whole number that becomes a fraction."""

    def __init__(self, i=0, o=0):
        super().__init__()
        self.register_buffer("mean", torch.tensor(0))

    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        if self.training:
            self.mean = 0.5 * self.mean + out.detach().abs().mean()
        return out * (1 + self.mean)


class Grows(Net):
    def __init__(self, i=0, o=0):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 3))

    def forward(self, x, edge_index):
        self.seen = torch.cat([self.seen, torch.ones(1, 3)])
        return super().forward(x, edge_index)


class ClampsInEvaluation(Net):
    def __init__(self, i=0, o=0):
        super().__init__()

    def forward(self, x, edge_index):
        if not self.training:
            with torch.no_grad():
                self.a.weight.clamp_(-0.1, 0.1)
        return super().forward(x, edge_index)


class HalvesInEvaluation(Net):
    def __init__(self, i=0, o=0):
        super().__init__()

    def forward(self, x, edge_index):
        return super().forward(x if self.training else x.mul_(0.5), edge_index)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Thaws, "began without requires_grad and has it now"),
        (Averages, r"buffer 'mean' was \[\] of int64 and a call replaced it by \[\] of float32"),
        (Grows, r"buffer 'seen' was \[0, 3\] of float32 and a call replaced it by \[1, 3\]"),
        (HalvesInEvaluation, "changes x in place"),
    ],
)
def test_what_would_train_other_numbers_is_refused(model, words):
    x = GRAPH.x.clone()
    try:
        with pytest.raises(WeftError, match=words):
            of_weft(model)
    finally:
        GRAPH.x.copy_(x)


def test_weights_that_an_evaluation_changes_are_not_stacked():
    tasks = [weft.Task(graph=GRAPH, model=ClampsInEvaluation, epochs=4, lr=lr, name=f"{lr}") for lr in (0.05, 0.1)]
    alone = [weft.run(task, device="cpu", progress=False).history["loss"] for task in tasks]
    together = weft.run(tasks, device="cpu", progress=False)
    for one, other in zip(together, alone, strict=True):
        assert one.history["loss"] == pytest.approx(other, rel=1e-5)


def test_a_hook_on_a_parameter_that_was_frozen_later_is_no_obstacle():
    def frozen():
        model = flipped(Net())
        model.a.weight.register_hook(lambda gradient: gradient)
        model.a.weight.requires_grad_(False)
        return model

    assert of_weft(frozen()) == pytest.approx(of_torch(frozen()), rel=1e-4)


def test_functions_in_lists_and_later_hooks_are_looked_through():
    listed, hooked = Net(), Net()
    listed.steps = [lambda x: listed.b(x)]
    hooked.b.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.add_(hooked.a.bias.sum()))
    assert functions_that_hold(listed) == ["steps"]
    assert functions_that_hold(hooked) == ["b.weight"]


class NormOfFirstCall(Net):
    """Keeps what it computes in its first call, as activation norms do."""

    def __init__(self, *sizes):
        super().__init__()
        self.shift = None

    def forward(self, x, edge_index):
        h = torch.relu(self.a(x))
        if self.shift is None:
            self.shift = h.mean(0).detach() + (1.0 if self.training else 0.0)
        return self.b(h - self.shift)


def test_the_first_call_of_the_module_that_trains_is_the_first_step():
    assert of_weft(NormOfFirstCall, seed=0) == pytest.approx(of_torch(NormOfFirstCall()), rel=1e-4)
