"""Training loops as one writes them with torch alone, and numbers of Weft compared with theirs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.behaviour.cases import graph

EPOCHS, RATE = 10, 0.02
CLOSE = {"rel": 2e-4, "abs": 2e-5}


def seed_all(seed: int) -> None:
    """The generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def arguments(module: nn.Module) -> tuple[Any, ...]:
    """What ``forward`` of a module takes besides the features."""
    names = module.forward.__code__.co_varnames[: module.forward.__code__.co_argcount]
    return () if len(names) < 3 else (graph().edge_index() if names[2] == "edge_index" else graph().adj,)


def train(
    module: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda weights: torch.optim.Adam(weights, lr=RATE),
    epochs: int = EPOCHS,
) -> tuple[list[float], list[float]]:
    """Training and validation losses of every epoch; ``module`` is changed."""
    data, edges = graph(), arguments(module)
    update, losses, validation = optimizer(module.parameters()), [], []
    for _ in range(epochs):
        module.train()
        update.zero_grad()
        output = module(data.x, *edges)
        logits, extra = output if isinstance(output, tuple) else (output, 0.0)
        loss = F.cross_entropy(logits[data.train], data.y[data.train]) + extra
        loss.backward()
        update.step()
        losses.append(loss.item())
        module.eval()
        with torch.no_grad():
            output = module(data.x, *edges)
            logits = output[0] if isinstance(output, tuple) else output
            validation.append(F.cross_entropy(logits[data.val], data.y[data.val]).item())
    return losses, validation


def assert_losses(found: Sequence[float], expected: Sequence[float]) -> None:
    """Equal up to rounding."""
    assert list(found) == pytest.approx(list(expected), **CLOSE)


def assert_same_run(found: Any, expected: Any) -> None:
    """History and weights of two results are equal up to rounding."""
    assert found.status == expected.status
    assert found.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        assert found.history[name] == pytest.approx(values, **CLOSE, nan_ok=True), name
    other = expected.model.state_dict()
    for name, value in found.model.state_dict().items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4)
