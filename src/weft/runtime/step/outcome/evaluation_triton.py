"""Triton kernel of ``evaluation.py``: cross-entropy and correct predictions of every split in one pass over the logits.

On small graphs kernel launches dominate an epoch, and two numbers per split would take a dozen of them.
Shapes: T members, N nodes, M nodes of all splits together, S splits, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import tl, triton


@triton.jit
def _score_kernel(
    logits, target, rows, starts, share, sums, C, N, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    split = tl.program_id(1)
    member = tl.program_id(2).to(tl.int64)
    start, stop = tl.load(starts + split), tl.load(starts + split + 1)
    m = start + tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BC)
    listed = m < stop
    row = tl.load(rows + m, mask=listed, other=0)
    label = tl.load(target + m, mask=listed, other=0)
    inside = listed[:, None] & (c < C)[None, :]
    at = (member * N + row)[:, None] * C + c[None, :]
    value = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.where(listed, tl.max(value, 1), 0.0)
    total = tl.sum(tl.exp(value - top[:, None]), 1)
    chosen = tl.sum(tl.where((c[None, :] == label[:, None]) & inside, value, 0.0), 1)
    loss = tl.log(tl.where(listed, total, 1.0)) + top - chosen
    # The first of equal maxima wins, as torch.argmax has it; NaN equals nothing and never hits.
    guess = tl.min(tl.where(value == top[:, None], c[None, :], BC), 1)
    hit = listed & (guess == label)
    # Losses of all splits, then hits of all splits: the order of a row of history, so that nothing is moved later.
    part = tl.load(share + split)
    splits, programs = tl.num_programs(1), tl.num_programs(0)
    into = sums + (member * 2 * splits + split) * programs + tl.program_id(0)
    tl.store(into, tl.sum(tl.where(listed, loss, 0.0), 0) * part)
    tl.store(into + splits * programs, tl.sum(hit.to(tl.float32), 0) * part)


class Scores:
    """Sums for the splits that lie one after the other in ``rows [M]`` with classes ``target [M]``."""

    def __init__(self, rows: Tensor, target: Tensor, sizes: list[int], classes: int) -> None:
        device = rows.device
        self._rows, self._target, self._splits = rows, target, len(sizes)
        self._starts = torch.tensor([0, *sizes], device=device).cumsum(0)
        self._share = 1.0 / torch.tensor(sizes, dtype=torch.float32, device=device)
        self._block_c = next_power_of_2(classes)
        self._block_m = max(1, 2048 // self._block_c)
        self._programs = -(-max(sizes) // self._block_m)

    def __call__(self, logits: Tensor) -> Tensor:
        """``logits [..., N, C]`` to the mean losses of the splits, then their accuracies ``[..., 2 S]``."""
        logits = logits.contiguous()
        lead, (nodes, classes) = logits.shape[:-2], logits.shape[-2:]
        sums = torch.empty(*lead, 2 * self._splits, self._programs, device=logits.device)
        _score_kernel[(self._programs, self._splits, lead.numel())](
            logits, self._target, self._rows, self._starts, self._share, sums, classes, nodes,
            BM=self._block_m, BC=self._block_c,
        )  # fmt: skip
        return sums.sum(-1)
