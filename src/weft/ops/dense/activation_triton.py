"""Activation and dropout of a tile, shared by kernels with an epilogue.

Shapes: a tile is rows by columns; F columns are parts of W, each of them a row of the mask by itself.
"""

from __future__ import annotations

from weft.ops.launch.triton_lang import tl, triton
from weft.ops.random.triton_bits import keep_scale, mask_row


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
