"""Launcher of ``attention.py``'s forward: the softmax's coefficients with their denominators, then the rows they weigh.

Everything in one pass over the edges, with a running softmax, was slower on an H200 (arxiv shape): each thread along the
features of a head repeated the scores, exponentials and dropout bits of its edge. See ``docs/measured.md``.
"""

from __future__ import annotations

from torch import Tensor

from weft.ops.attention_coefficients_triton import softmax_coefficients
from weft.ops.attention_gather_triton import GatherLaunch, gather
from weft.ops.backend import accumulate_dtype
from weft.ops.lanes_triton import spaced_rows
from weft.ops.walk import Walk


def attention_forward_triton(
    x: Tensor, a_src: Tensor, a_dst: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None, site: int,
    walk: Walk, training: bool, launch: GatherLaunch | None = None, limit: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(out, out_plus, alpha_plus, log_sum)``; the second is left unwritten unless ``training``.

    ``limit``: how far apart source scores may lie before rows look for their own maximum.
    """
    H, D = x.shape[-2:]
    N, lead, acc = walk.num_rows, x.shape[:-3], accumulate_dtype(x.dtype)
    x, spacing = spaced_rows(x, 2)
    out, out_plus = x.new_empty(*lead, N, H, D), x.new_empty(*lead, N, H, D)
    alpha_plus, log_sum = x.new_empty(*lead, N, H, dtype=acc), x.new_empty(*lead, N, H, dtype=acc)
    if out.numel():
        weights, inverse = softmax_coefficients(
            a_src, a_dst, slope, rate, clock, site, walk, log_sum, alpha_plus, limit
        )
        gather(x, spacing, False, weights, H, D, walk, training, out, H * D, out_plus, inverse=inverse, launch=launch)
    return out, out_plus, alpha_plus, log_sum
