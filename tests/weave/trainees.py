"""Members to weave: T models in training on one graph, written out plainly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.graphs_for_tests import CLASSES, FEATURES
from weft import ops
from weft.graph.graph import Graph
from weft.nn.models import build
from weft.weave.merge import Woven, weave
from weft.weave.recorder import record

STEPS = 3


class Trainee:
    """T models of one shape that differ in their seeds; ``step()`` trains all of them once, in place.

    State: ``flat [T, P]``, two ``moments [T, P]``, ``clock [T, 2]``.
    """

    def __init__(self, graph: Graph, model: str, layers: int, tasks: int = 1, seed: int = 0, **options: Any) -> None:
        options = {"hidden": 8, "dropout": 0.3, "heads": 2, **options}
        if model not in ("gat", "gatv2"):
            del options["heads"]
        self.name = f"{model} of {layers}"
        self.graph, self.model = graph, build(model, FEATURES, CLASSES, layers=layers, **options)
        named = dict(self.model.named_parameters())
        self.names, self.shapes = list(named), [p.shape for p in named.values()]
        random = torch.Generator().manual_seed(seed)
        count = sum(shape.numel() for shape in self.shapes)
        self.flat = 0.3 * torch.randn(tasks, count, generator=random)
        self.moments = torch.zeros(tasks, count), torch.zeros(tasks, count)
        self.clock = torch.tensor([[seed + task, 0] for task in range(tasks)])
        self.hyper = torch.tensor([[0.01, 0.9, 0.999, 1e-8, 5e-4, 0.0, 0.1, 0.001, 0.1, 0.001]] * tasks)
        self.losses = torch.zeros(tasks)

    def state(self) -> list[Tensor]:
        """Everything that a step changes."""
        return [self.flat, *self.moments, self.clock, self.losses]

    def step(self) -> Tensor:
        """Forward, loss, backward and update; the losses ``[T]``."""
        leaf = self.flat.detach().requires_grad_()
        losses = torch.vmap(self._loss)(leaf, self.clock)
        (grad,) = torch.autograd.grad(losses.sum(), leaf)
        ops.adam_(self.flat, grad, *self.moments, self.hyper)
        self.clock[:, 1].add_(1)
        self.losses.copy_(losses.detach())
        return self.losses

    def _loss(self, flat: Tensor, clock: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in self.shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}
        clocks = {name: clock for name, _ in self.model.named_buffers() if name.endswith("clock")}
        logits = torch.func.functional_call(self.model, weights | clocks, (self.graph.x, self.graph.adj))
        return ops.cross_entropy_rows(logits, self.graph.y, self.graph.train)


def snapshot(trainees: list[Trainee]) -> list[list[Tensor]]:
    """Copies of every member's state."""
    return [[tensor.clone() for tensor in trainee.state()] for trainee in trainees]


def restore(trainees: list[Trainee], saved: list[list[Tensor]]) -> None:
    """Put it back."""
    for trainee, tensors in zip(trainees, saved, strict=True):
        for tensor, value in zip(trainee.state(), tensors, strict=True):
            tensor.copy_(value)


def assert_trains_as_alone(
    trainees: list[Trainee], structures: tuple[str, ...] = ("same", "any"), small: bool = False
) -> Woven:
    """State after several woven steps equals the state after as many separate ones; returns the woven step."""
    start = snapshot(trainees)
    for _ in range(STEPS):
        for trainee in trainees:
            trainee.step()
    expected = snapshot(trainees)
    restore(trainees, start)
    captured = [record(trainee.step, trainee.name, trainee.state(), split=small) for trainee in trainees]
    woven = weave(captured, structures, small=small)
    for before, after in zip(start, snapshot(trainees), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "recording moved the state"
    for _ in range(STEPS):
        losses = woven()
    for trainee, tensors, loss in zip(trainees, expected, losses, strict=True):
        assert torch.equal(loss, trainee.losses)
        for mine, theirs in zip(trainee.state(), tensors, strict=True):
            assert torch.equal(mine, theirs)
    return woven
