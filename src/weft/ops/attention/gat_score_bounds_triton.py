"""Triton kernels of ``gat.py``: the highest and the lowest source score of every task and head.

With a slope in [0, 1] leaky_relu is monotonic, so ``leaky_relu(highest + a_dst[i])`` bounds every score of row i: the
softmax's shift is known before any edge is read. A score is at most ``highest - lowest`` below it, which says whether
its exponential still has full precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.device_limits import limits_of
from weft.ops.launch.launch import triton_acc
from weft.ops.launch.triton_lang import tl, triton

# float32's exponentials err by 1e-6 at a shift of 30 and by twice that at 60; rows of half precision are rounded more
# coarsely than that, and their coefficients are float32's.
SPREAD_LIMIT = {torch.float16: 60.0, torch.bfloat16: 60.0, torch.float32: 30.0, torch.float64: 60.0}


def spread_limit(dtype: torch.dtype, slope: float) -> float:
    """The largest spread of a head's source scores for which one bound serves all of its rows.

    Coefficients are then at least ``exp(-limit)``, far above the denormal range. With a slope outside of [0, 1]
    leaky_relu is not monotonic or widens the spread: no spread is small enough.
    """
    return SPREAD_LIMIT[dtype] if 0.0 <= slope <= 1.0 else -1.0


@triton.jit
def _extremes_kernel(
    a_src, part, M, rows_per_program,
    H: tl.constexpr, S_SRC: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The extremes of a run of rows, into ``part [2, T, P, H]``."""
    run = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    first = run * rows_per_program
    last = tl.minimum(first + rows_per_program, M)
    highest = tl.full([BN, BH], float("-inf"), ACC)
    lowest = tl.full([BN, BH], float("inf"), ACC)
    for base in range(first, last, BN):
        n = base + tl.arange(0, BN)
        seen = (n < last)[:, None] & (h < H)[None, :]
        score = tl.load(a_src + (task * M + n)[:, None] * S_SRC + h[None, :], mask=seen, other=0.0).to(ACC)
        highest = tl.maximum(highest, tl.where(seen, score, float("-inf")))
        lowest = tl.minimum(lowest, tl.where(seen, score, float("inf")))
    at = (task * tl.num_programs(0) + run) * H + h
    size = tl.num_programs(2).to(tl.int64) * tl.num_programs(0) * H
    tl.store(part + at, tl.max(highest, 0), mask=h < H)
    tl.store(part + size + at, tl.min(lowest, 0), mask=h < H)


@triton.jit
def _bounds_kernel(part, bounds, runs, H: tl.constexpr, BP: tl.constexpr, BH: tl.constexpr):
    """The extremes of all runs, ``part [2, T, P, H]`` to ``bounds [T, 2, H]``."""
    task = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * BH + tl.arange(0, BH)
    run = tl.arange(0, BP)
    seen = (run < runs)[:, None] & (h < H)[None, :]
    at = (task * runs + run)[:, None] * H + h[None, :]
    size = tl.num_programs(1).to(tl.int64) * runs * H
    highest = tl.max(tl.load(part + at, mask=seen, other=float("-inf")), 0)
    lowest = tl.min(tl.load(part + size + at, mask=seen, other=float("inf")), 0)
    tl.store(bounds + task * 2 * H + h, highest, mask=h < H)
    tl.store(bounds + (task * 2 + 1) * H + h, lowest, mask=h < H)


def score_bounds(a_src: Tensor, spacing: int, like: Tensor, programs: int | None = None) -> Tensor:
    """``[T, 2, H]``, the highest and the lowest of ``a_src [..., M, H]`` over M, in the type of ``like``.

    Rows of ``a_src`` are ``spacing`` elements apart. About two programs per multiprocessor, whatever M is.
    """
    M, H = a_src.shape[-2:]
    tasks = a_src.shape[:-2].numel()
    block_h = min(8, next_power_of_2(H))
    block_n = 1024 // block_h
    programs = limits_of(a_src.device).programs(2) if programs is None else programs
    rows = max(block_n, -(-M // programs))
    runs = max(1, -(-M // rows))
    part, bounds = like.new_empty(2, tasks, runs, H), like.new_empty(tasks, 2, H)
    tiles = -(-H // block_h)
    _extremes_kernel[(runs, tiles, tasks)](
        a_src, part, M, rows, H=H, S_SRC=spacing, ACC=triton_acc(like.dtype), BN=block_n, BH=block_h, num_warps=4,
    )  # fmt: skip
    _bounds_kernel[(tiles, tasks)](part, bounds, runs, H=H, BP=next_power_of_2(runs), BH=block_h, num_warps=4)
    return bounds
