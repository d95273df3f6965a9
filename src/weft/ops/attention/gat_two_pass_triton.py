"""Launchers of ``gat.py`` in two passes: coefficients ``[E, H]`` first, then the weighted rows.

One pass (``gat_forward_triton.py``, ``gat_backward_triton.py``) is faster where a head fills its lanes: 0.179 and
0.150 ms on an H200 against 0.233 and 0.225 (arxiv shape, 4 heads of 16, float32). It pads every head to a power of two, and
in half precision a thread of it loads 8 bytes at a time. Here a head is split into groups that fill the lanes: an epoch
of a GAT with heads of 40 in its last layer takes 2.31 ms per task with that layer in two passes and 2.50 in one, and in
bfloat16 1.55 against 1.85 (16 tasks). If the coefficients do not stay in the cache, one pass is faster: on the products
shape, with heads of 47, it took 96 ms and two passes 119.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.attention.gat_two_pass_coefficients_triton import coefficients_back, softmax_coefficients
from weft.ops.attention.gat_two_pass_rows_triton import gather_rows
from weft.ops.csr.packed import PackedCSR
from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.device_limits import H200, DeviceLimits
from weft.ops.launch.launch import flatten_tasks
from weft.ops.sparse.lanes_triton import add_hub_parts, spaced_rows

WIDEST = 32  # features of a head that fills its lanes


def suits_one_pass(dtype: torch.dtype, width: int, coefficients: int, limits: DeviceLimits = H200) -> bool:
    """Whether one pass is faster than two for heads of ``width`` features and so many ``coefficients`` per task."""
    full = width <= WIDEST and width == next_power_of_2(width)
    return dtype.itemsize >= 4 and (full or coefficients * dtype.itemsize > limits.l2_for_coefficients)


def forward_in_two_passes(
    x: Tensor, a_src: Tensor, a_dst: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None, site: int,
    csr: PackedCSR, training: bool, results: tuple[Tensor, Tensor, Tensor, Tensor], limit: float | None = None,
) -> None:  # fmt: skip
    """Fill ``results``: out, out_plus (if ``training``), alpha_plus and log_sum."""
    H, D = x.shape[-2:]
    out, out_plus, alpha_plus, log_sum = results
    x, spacing = spaced_rows(x, 2)
    weights, inverse = softmax_coefficients(a_src, a_dst, slope, rate, clock, site, csr, log_sum, alpha_plus, limit)
    gather_rows(x, spacing, False, weights, H, D, csr, training, out, H * D, out_plus, inverse=inverse)


def backward_in_two_passes(
    grad: Tensor, shared: bool, x: Tensor, a_src: Tensor, stats: Tensor, slope: float, rate: Tensor | None,
    clock: Tensor | None, site: int, back: PackedCSR, grad_x: Tensor, grad_a: Tensor,
) -> None:  # fmt: skip
    """Fill ``grad_x [..., M, H, D]`` and ``grad_a [..., M, H]``; ``grad`` is one row for all heads if ``shared``."""
    M, H, D = x.shape[-3:]
    (x, s_x), (_, g_x), (_, g_src) = spaced_rows(x, 2), spaced_rows(grad_x, 2), spaced_rows(grad_a, 1)
    weights, loss, part = coefficients_back(flatten_tasks(stats, 3), a_src, slope, rate, clock, site, back)
    if back.work.hub_of_partial.numel():
        add_hub_parts(part, back.work, loss, M, H)
    gather_rows(
        grad, D if shared else H * D, shared, weights, H, D, back, True, grad_x, g_x, own=x, own_spacing=s_x,
        loss=loss, grad_a=grad_a, grad_a_spacing=g_src, slope=slope,
    )  # fmt: skip
