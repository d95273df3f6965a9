"""Activation and dropout of a tile, shared by kernels with an epilogue.

Shapes: a tile is rows by columns; F columns are parts of W, each of them a row of the mask by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.launch.triton_lang import tl, triton
from weft.ops.random_bits_triton import keep_scale, mask_row


@triton.jit
def activate(value, ACT: tl.constexpr):
    """``act(value)``."""
    if ACT == "relu":
        # A comparison that NaN passes: a diverged value must stay visible.
        value = tl.where(value <= 0.0, 0.0, value)
    elif ACT == "elu":
        value = tl.where(value > 0.0, value, tl.exp(value) - 1.0)
    return value


@triton.jit
def drop_scale(key, fraction, n, f, F: tl.constexpr, W: tl.constexpr):
    """``keep / (1 - rate)`` of rows ``n`` (int64) and columns ``f``."""
    if W == F:
        return keep_scale(mask_row(key, n)[:, None], fraction, f[None, :])
    else:  # noqa: RET505  a choice at compile time: Triton must not see both
        return keep_scale(mask_row(key, n[:, None] * (F // W) + f[None, :] // W), fraction, f[None, :] % W)


# ---- Second stage of split-K: sum partial results in a fixed order


@triton.jit
def _add_parts_kernel(partial, first, second, parts, K1, K2, BP: tl.constexpr, BK: tl.constexpr):
    """Parts ``[T, P, K1 + K2]`` added up: the leading K1 sums to ``first [T, K1]``, the others to ``second [T, K2]``."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    task = tl.program_id(1).to(tl.int64)
    K = K1 + K2
    sums = tl.zeros([BP, BK], partial.dtype.element_ty)
    for base in range(0, parts, BP):
        p = base + tl.arange(0, BP)
        at = (task * parts + p)[:, None] * K + k[None, :]
        sums += tl.load(partial + at, mask=(p < parts)[:, None] & (k < K)[None, :], other=0.0)
    total = tl.sum(sums, 0)
    tl.store(first + task * K1 + k, total.to(first.dtype.element_ty), mask=k < K1)
    tl.store(second + task * K2 + k - K1, total.to(second.dtype.element_ty), mask=(k >= K1) & (k < K))


def add_parts(partial: Tensor, sizes: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(first [T, K1], second [T, K2])`` in ``dtype``, the sums of ``partial [T, P, K1 + K2]`` over its parts.

    Two separate tensors: an operator may not return two views of one. Few columns per program, because the sums
    are few and the parts many (16 tasks or one, torch's reduction takes 8 microseconds on an H200).
    """
    tasks, parts, _ = partial.shape
    first, second = (partial.new_empty(tasks, size, dtype=dtype) for size in sizes)
    _add_parts_kernel[(-(-sum(sizes) // 32), tasks)](
        partial, first, second, parts, *sizes, BP=min(128, max(16, 1 << (parts - 1).bit_length())), BK=32, num_warps=8
    )
    return first, second
