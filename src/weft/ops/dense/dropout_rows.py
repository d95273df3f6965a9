"""Dropout of rows that are part of a larger matrix: the mask is that of the whole matrix, from a given row on.

The fused operators count rows from 0. A rank that holds rows ``first`` to ``first + N`` of a matrix drops what one
process would drop of them, so that a sharded run has the masks of a run on one device.

Shapes: N rows, F features; ``clock [2]`` and ``rate []`` of one task (``vmap`` adds tasks).
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.dense.bias_act_dropout import as_rate
from weft.ops.random.torch_bits import keep_mask_rows


def dropout_rows(
    x: Tensor, p: float | Tensor, clock: Tensor | None, site: int, first: int = 0, parts: int = 1
) -> Tensor:
    """``keep / (1 - p) * x`` for ``x [N, F]`` or ``[Z]``, whose row 0 is row ``first`` of the whole.

    ``parts``: heads side by side in F, each a row of the mask by itself, as in :func:`weft.ops.bias_act_dropout`.
    """
    rate = as_rate(p, x.device) if clock is not None else None
    if rate is None or clock is None or x.numel() == 0:
        return x
    columns = 1 if x.dim() == 1 else x.shape[-1] // parts
    rows_of_one = x[0].numel() // columns if x.dim() > 1 else 1
    keep = keep_mask_rows(rate, clock, site, x.numel() // columns, columns, first * rows_of_one).reshape(x.shape)
    scale = 1.0 / (1.0 - rate.to(torch.float32))
    return (x * torch.where(keep, scale, 0.0)).to(x.dtype)
