"""Triton kernel of ``record.py``: all comparisons of the book-keeping in one launch instead of twenty.

Shapes: M columns of history.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.backend import next_power_of_2
from weft.ops.lang import tl, triton
from weft.run.state import State


@triton.jit
def _record_kernel(
    row, history, step_at, end_at, score_at, epoch_at, better_at, M,
    LOSSES: tl.constexpr, WATCHED: tl.constexpr, PATIENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < M
    value = tl.load(row + column, mask=inside, other=0.0)
    step, end, best_epoch = tl.load(step_at), tl.load(end_at), tl.load(epoch_at)
    tl.store(history + step * M + column, value, mask=inside)
    unhealthy = tl.sum(tl.where((column < LOSSES) & ~(tl.abs(value) < float("inf")), 1, 0), 0)
    better = (step < end) & (unhealthy == 0)
    if WATCHED >= 0:
        score = tl.sum(tl.where(column == WATCHED, tl.where(value == value, value, -1.0), 0.0), 0)
        best_score = tl.load(score_at)
        better = better & (score > best_score)
        tl.store(score_at, tl.where(better, score, best_score))
    best_epoch = tl.where(better, step, best_epoch)
    tl.store(epoch_at, best_epoch)
    over = unhealthy > 0
    if PATIENCE >= 0:
        over = over | (step - best_epoch >= PATIENCE)
    tl.store(end_at, tl.where((step < end) & over, step + 1, end))
    tl.store(better_at, better.to(tl.int32))


def record_triton(state: State, row: Tensor, losses: int, watched: int | None, patience: int | None) -> Tensor:
    """Record ``row [M]``; returns whether it is the best so far, ``[1]`` bool."""
    better = torch.empty(1, dtype=torch.int32, device=row.device)
    _record_kernel[(1,)](
        row, state.history, state.step, state.end, state.best_score, state.best_epoch, better, row.numel(),
        LOSSES=losses, WATCHED=-1 if watched is None else watched, PATIENCE=-1 if patience is None else patience,
        BLOCK=next_power_of_2(row.numel()), num_warps=1,
    )  # fmt: skip
    return better.bool()
