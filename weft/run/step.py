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
from weft.run.state import State


class Forward:
    """A model as a function of its flat parameters: ``forward(flat [P]) -> logits [N, C]``.

    ``call`` runs the model on the graph; ``dtype`` is the type of weights and activations.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, call: Callable[[], Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        self._model, self._layout, self._call, self._dtype = model, layout, call, dtype
        self.slots = Slots(model, layout.names)

    def __call__(self, flat: Tensor, training: bool) -> Tensor:
        """Logits, with dropout and batch statistics when ``training``."""
        self._model.train(training)
        self.slots.fill(self._layout.views(flat.to(self._dtype)))
        return self._call()


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
        self._state, self._buffers, self._patience = state, buffers, patience
        self._losses = len(evaluation.splits) + 1
        has_val = "val" in evaluation.splits
        self._watched = self._losses + evaluation.splits.index("val") if has_val else None

    def __call__(self) -> None:
        """Train one epoch and evaluate the weights it left."""
        loss = self._train()
        with torch.no_grad():
            self._record(self._measure(loss))
            self._state.step.add_(1)

    def without_evaluation(self) -> None:
        """Train one epoch; only its training loss is recorded."""
        loss = self._train()
        self._state.history[:, 0].index_copy_(0, self._state.step, loss.reshape(1))
        self._state.step.add_(1)

    def _train(self) -> Tensor:
        state = self._state
        leaf = state.flat.detach().requires_grad_()
        loss = self._loss(self._forward(leaf, training=True))
        (grad,) = torch.autograd.grad(loss, leaf)
        self._buffers.collect(state.buffers)
        self._optimizer.update(state.flat, grad, state.moments, state.step)
        return loss.detach()

    def _measure(self, loss: Tensor) -> Tensor:
        """The row of history ``[1, M]``: training loss, then losses and metrics of the splits."""
        row = self._evaluation(self._forward(self._state.flat, training=False))
        return torch.cat([loss.reshape(1), row]).unsqueeze(0)

    def _record(self, row: Tensor) -> None:
        """Write the row, keep the weights if they are the best so far, and see whether to stop."""
        state = self._state
        state.history.index_copy_(0, state.step, row)
        running = state.step < state.end
        healthy = row[:, : self._losses].isfinite().all(1)
        better = running & healthy
        if self._watched is not None:
            # A metric can be undefined (NaN) on a split; such a row ranks below every defined one.
            score = row[:, self._watched].nan_to_num(nan=-1.0)
            better &= score > state.best_score
            state.best_score.copy_(torch.where(better, score, state.best_score))
        state.best_epoch.copy_(torch.where(better, state.step, state.best_epoch))
        self._keep(better)
        over = ~healthy
        if self._patience is not None:
            over |= state.step - state.best_epoch >= self._patience
        state.end.copy_(torch.where(running & over, state.step + 1, state.end))

    def _keep(self, better: Tensor) -> None:
        state = self._state
        if not better.is_cuda:
            # Asking costs nothing on a CPU, copying all weights every epoch does.
            if not bool(better):
                return
            state.best_flat.copy_(state.flat)
            for name, buffer in state.buffers.items():
                state.best_buffers[name].copy_(buffer)
            return
        state.best_flat.copy_(torch.where(better, state.flat, state.best_flat))
        for name, buffer in state.buffers.items():
            best = state.best_buffers[name]
            best.copy_(torch.where(better, buffer, best))
