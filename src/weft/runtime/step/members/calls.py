"""Calls: call one member's module by itself, again and again from the same weights and with the same draws.

Shapes: P parameters, N nodes, C classes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from weft.runtime.batches.source import Batch
from weft.runtime.device.threads import step_seconds
from weft.runtime.device.torch_rng import same_draws
from weft.runtime.loop.outputs import as_one, of_member
from weft.runtime.step.forward import Forward, Loss
from weft.runtime.step.state import State
from weft.runtime.user_modules.input_writes import same_numbers


class Calls:
    """Calls of one member by itself, each from the same ``state`` and with the same draws."""

    def __init__(self, forward: Forward, state: State, batch: Batch, loss: Loss) -> None:
        self.forward, self.state, self.batch, self._loss = forward, state, batch, loss
        self._before, self._slopes = state.snapshot(), torch.ones(1, device=state.flat.device)
        self.seconds = 0.0  # of all calls so far, without what is around them

    def step(self) -> tuple[Tensor, Tensor]:
        """Losses ``[1]`` and gradients ``[1, P]`` from where the state and the generators are."""
        begin = step_seconds()
        found = self.forward.gradients(self.state.flat, self.batch, self._loss, self._slopes)
        self.seconds += step_seconds() - begin
        return found

    def train(self) -> tuple[Tensor, Tensor]:
        """The same from the beginning."""
        self.state.restore(self._before)
        with same_draws(self.state.flat.device):
            return self.step()

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """Inside, the weights and the draws are others."""
        self.state.restore(self._before)
        self.state.flat.mul_(1.5).add_(0.01)
        with same_draws(self.state.flat.device):
            torch.manual_seed(torch.initial_seed() + 1)
            random.seed(random.random())
            np.random.seed(np.random.randint(1 << 31))
            yield

    def train_elsewhere(self) -> tuple[Tensor, Tensor]:
        """A training call with other weights and other draws."""
        with self._elsewhere():
            return self.step()

    def evaluate_elsewhere(self) -> Tensor:
        """Logits ``[N, C]`` in evaluation mode with other weights and other draws."""
        with torch.no_grad(), self._elsewhere():
            return self._logits()

    def evaluate(self) -> Tensor:
        """Logits ``[N, C]`` in evaluation mode."""
        self.state.restore(self._before)
        with torch.no_grad(), same_draws(self.state.flat.device):
            return self._logits()

    def _logits(self) -> Tensor:
        begin = step_seconds()
        found = self.forward(self.state.flat, training=False, batch=self.batch)
        self.seconds += step_seconds() - begin
        return as_one(of_member(found, 0))

    def changed_buffers(self) -> set[str]:
        """Names of the buffers that the last call has changed."""
        before = {name: self._before[f"buffer.{name}"] for name in self.state.buffers}
        return {name for name, one in self.state.buffers.items() if not same_numbers(one, before[name])}


class AloneStep:
    """A training call and one in evaluation mode of one member by itself, with a ``state`` of its own: to be timed."""

    def __init__(self, forward: Forward, state: State, batch: Batch, loss: Loss) -> None:
        self._forward, self.state, self._batch, self._loss = forward, state, batch, loss
        self._slopes = torch.ones(1, device=state.flat.device)

    def __call__(self) -> None:
        self._forward.gradients(self.state.flat, self._batch, self._loss, self._slopes)
        with torch.no_grad():
            self._forward(self.state.flat, training=False, batch=self._batch)
