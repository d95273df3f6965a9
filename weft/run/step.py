"""The functional step: forward, loss, backward and update, evaluation and book-keeping, in tensors alone.

Nothing here asks the host for a number: rates come from a table by the step's own counter, dropout from a
clock, and the best weights and the end of training are found by comparisons on the device. So the same code
runs eagerly on a CPU and is recorded once and replayed on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from weft.run.buffers import BufferSlots
from weft.run.evaluation import Evaluation
from weft.run.optimizers import Optimizer
from weft.run.parameters import Layout, Slots
from weft.run.record import Recorder
from weft.run.state import State


class Forward:
    """A model as a function of its flat parameters: ``forward(flat [P]) -> logits [N, C]``.

    ``call`` runs the model on the graph; ``dtype`` is the type of weights and activations.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, call: Callable[[], Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        self._layout, self._call, self._dtype = layout, call, dtype
        self._set_mode = mode_switch(model)
        self.slots = Slots(model, layout.names)

    def __call__(self, flat: Tensor, training: bool) -> Tensor:
        """Logits, with dropout and batch statistics when ``training``."""
        self._set_mode(training)
        self.slots.fill(self._layout.views(flat.to(self._dtype)))
        return self._call()


def mode_switch(model: nn.Module) -> Callable[[bool], object]:
    """What ``model.train(mode)`` does, without the traversal: that costs 4 us a module, twice an epoch."""
    if any(type(module).train is not nn.Module.train for module in model.modules()):
        return model.train
    tables = [module.__dict__ for module in model.modules()]

    def set_mode(training: bool) -> None:
        for table in tables:
            table["training"] = training

    return set_mode


class Step:
    """One epoch of one task on its state, in place."""

    def __init__(
        self,
        forward: Forward,
        loss: Callable[[Tensor], Tensor],
        optimizer: Optimizer,
        evaluation: Evaluation,
        state: State,
        buffers: BufferSlots,
        patience: int | None = None,
    ) -> None:
        self._forward, self._loss = forward, loss
        self._optimizer, self._evaluation = optimizer, evaluation
        self._state, self._buffers = state, buffers
        splits = evaluation.splits
        watched = 1 + len(splits) + splits.index("val") if "val" in splits else None
        self._record = Recorder(1 + len(splits), watched, patience)

    def __call__(self) -> None:
        """Train one epoch and evaluate the weights it left."""
        state = self._state
        loss = self._train()
        with torch.no_grad():
            measured = self._evaluation(self._forward(state.flat, training=False))
            self._record(state, torch.cat([loss.reshape(1), measured]))
        state.step.add_(1)

    def without_evaluation(self) -> None:
        """Train one epoch; only its training loss is recorded."""
        state = self._state
        loss = self._train()
        state.history[:, 0].index_copy_(0, state.step, loss.reshape(1))
        state.step.add_(1)

    def _train(self) -> Tensor:
        state = self._state
        leaf = state.flat.detach().requires_grad_()
        loss = self._loss(self._forward(leaf, training=True))
        (grad,) = torch.autograd.grad(loss, leaf)
        self._buffers.collect(state.buffers)
        self._optimizer.update(state.flat, grad, state.moments, state.step)
        return loss.detach()
