"""Sixty modules: alone as a plain loop of torch, stacked as alone, resumed as uninterrupted."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import weft
from tests.stacks import start
from weft.runtime.step.inputs import bind

pytest.importorskip("torch_geometric")
from tests.runtime.user_modules.own_modules import OWN
from tests.runtime.user_modules.pyg_modules import LAYERS

EPOCHS, RATE = 3, 0.02
MODULES = LAYERS | {kind.__name__: kind for kind in OWN}


def test_there_are_sixty():
    assert (len(LAYERS), len(OWN)) == (37, 23)


@cache
def small() -> weft.Graph:
    draw = np.random.default_rng(0)
    src, dst = draw.integers(0, 40, (2, 120))
    x, y = draw.normal(size=(40, 6)).astype("float32"), draw.integers(0, 3, 40)
    return weft.Graph.from_edges(src, dst, num_nodes=40, x=x, y=y, directed=False, name="g").random_split(0.5, 0.25)


def group_of(name, seeds, device="cpu", **changes):
    make = MODULES[name]
    shared = {"graph": small(), "model": make, "epochs": EPOCHS, "lr": RATE, "weight_decay": 0.01}
    tasks = [weft.Task(seed=seed, name=f"{name} {seed}", **shared) for seed in seeds]
    return start(tasks, small(), device, join="stacked" if len(tasks) > 1 else "solo", **changes)


def losses_of(group):
    """The training losses of every member, as they are on the device."""
    return [member.stack.state.history[member.row, :EPOCHS, 0].tolist() for member in group.members]


def trained(name, seeds, device="cpu", **changes):
    group = group_of(name, seeds, device, **changes)
    group.advance(EPOCHS)
    return losses_of(group)


def plain(name, seed=0, device="cpu"):
    """The loop that a user would write."""
    batch = batch_on(device)
    torch.manual_seed(seed)
    module, losses = MODULES[name](6, 3).to(device), []
    call, rows = bind(module), batch.rows
    update = torch.optim.Adam(module.parameters(), lr=RATE, weight_decay=0.01)
    for _ in range(EPOCHS):
        module.train()
        update.zero_grad()
        loss = F.cross_entropy(call(batch)[rows], batch.y[rows])
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


@cache
def batch_on(device):
    """The whole graph."""
    return group_of("Sorted", [0], device).stacks[0].source.example()


@pytest.mark.parametrize("name", MODULES)
def test_alone_stacked_and_resumed(name):
    (alone,) = trained(name, [0])
    assert alone == pytest.approx(plain(name), rel=1e-4, abs=1e-5)
    first, second = trained(name, [0, 1])
    assert first == pytest.approx(alone, rel=2e-4, abs=1e-5)
    assert second == pytest.approx(trained(name, [1])[0], rel=2e-4, abs=1e-5)
    assert resumed(name) == [alone]


def resumed(name):
    """An epoch, a checkpoint, and the rest by another run."""
    before = group_of(name, [0])
    before.advance(1)
    saved = {key: value.clone() for key, value in before.tensors().items()}
    after = group_of(name, [0])
    after.restore(saved)
    after.advance(EPOCHS - 1)
    return losses_of(after)
