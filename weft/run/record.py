"""Book-keeping after an evaluation: the history, the best weights so far, and whether to stop.

Two ways to the same state: by comparisons on the device, which a recording can replay, and on the host,
which is quicker where the state lies there anyway (a tensor operation costs more than the arithmetic).

Shapes: ``row [M]`` is one row of history: training loss, losses of the splits, metrics of the splits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.backend import on_gpu, use_triton
from weft.run.record_triton import record_triton
from weft.run.state import State


@dataclass(frozen=True)
class Recorder:
    """Writes rows into a state. ``losses``: how many leading columns must stay finite; ``watched``: the column
    of the validation metric (None: the latest epoch is the best); ``patience``: epochs, or None for no limit.
    """

    losses: int
    watched: int | None
    patience: int | None

    def __call__(self, state: State, row: Tensor) -> None:
        """Record ``row`` for the epoch that the state's clock shows."""
        if on_gpu(row):
            self.on_device(state, row)
        else:
            self.on_host(state, row)

    def on_host(self, state: State, row: Tensor) -> None:
        """With Python's numbers."""
        step, values = int(state.step), row.tolist()
        state.history[step] = row
        running = step < int(state.end)
        healthy = all(map(math.isfinite, values[: self.losses]))
        if running and healthy and self._improves(state, values):
            state.best_epoch.fill_(step)
            state.best_flat.copy_(state.flat)
            for name, buffer in state.buffers.items():
                state.best_buffers[name].copy_(buffer)
        tired = self.patience is not None and step - int(state.best_epoch) >= self.patience
        if running and (tired or not healthy):
            state.end.fill_(step + 1)

    def _improves(self, state: State, values: list[float]) -> bool:
        if self.watched is None:
            return True
        score = values[self.watched]
        score = -1.0 if math.isnan(score) else score  # undefined ranks below every defined one
        if score <= float(state.best_score):
            return False
        state.best_score.fill_(score)
        return True

    def on_device(self, state: State, row: Tensor) -> None:
        """With tensors alone."""
        better = self._compare_triton(state, row) if use_triton(row) else self.compare(state, row)
        torch.where(better, state.flat, state.best_flat, out=state.best_flat)
        for name, buffer in state.buffers.items():
            torch.where(better, buffer, state.best_buffers[name], out=state.best_buffers[name])

    def _compare_triton(self, state: State, row: Tensor) -> Tensor:
        return record_triton(state, row, self.losses, self.watched, self.patience)

    def compare(self, state: State, row: Tensor) -> Tensor:
        """Write the row and find the best and the end; returns whether it is the best so far ``[1]`` bool."""
        step = state.step
        state.history.index_copy_(0, step, row.unsqueeze(0))
        running = step < state.end
        healthy = row[: self.losses].isfinite().all()
        better = running & healthy
        if self.watched is not None:
            score = row[self.watched].nan_to_num(nan=-1.0)
            better = better & (score > state.best_score)
            torch.where(better, score, state.best_score, out=state.best_score)
        torch.where(better, step, state.best_epoch, out=state.best_epoch)
        over = ~healthy
        if self.patience is not None:
            over = over | (step - state.best_epoch >= self.patience)
        torch.where(running & over, step + 1, state.end, out=state.end)
        return better
