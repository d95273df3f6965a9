"""Triton kernels of ``attention.py``, backward: what a row knows of itself, then the transpose.

The coefficients come first, in the transpose's order, then the rows that they weigh (``attention_gather_triton.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.attention_coefficients_triton import coefficients_back
from weft.ops.attention_gather_triton import GatherLaunch, gather
from weft.ops.backend import next_power_of_2
from weft.ops.lanes_triton import add_hub_parts, spaced_rows
from weft.ops.lang import tl, triton
from weft.ops.launch import flatten_tasks, triton_acc
from weft.ops.walk import Walk


@triton.jit
def _row_gradient_kernel(
    grad, out, out_plus, alpha_plus, a_dst, log_sum, stats, grad_a_dst, items, slope,
    H: tl.constexpr, D: tl.constexpr, S_DST: tl.constexpr, G_DST: tl.constexpr, SHARED: tl.constexpr, ACC: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Per row and head: delta, d a_dst, and the three numbers that the pass over the transpose reads together."""
    item = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)  # a row and a head
    row, head = item // H, item % H
    valid = item < items
    # What is one number an item is asked for first, or it would wait until the sums are there.
    share = tl.load(alpha_plus + item, mask=valid, other=0.0)
    score = tl.load(a_dst + row * S_DST + head, mask=valid, other=0.0).to(ACC)
    lse = tl.load(log_sum + item, mask=valid, other=0.0)
    all_of = tl.zeros([BN, BD], ACC)
    plus_of = tl.zeros([BN, BD], ACC)
    for first in tl.static_range(0, D, BD):
        d = first + tl.arange(0, BD)
        mask = valid[:, None] & (d < D)[None, :]
        at = item[:, None] * D + d[None, :]
        at_grad = row[:, None] * D + d[None, :] if SHARED else at
        g = tl.load(grad + at_grad, mask=mask, other=0.0).to(ACC)
        all_of += g * tl.load(out + at, mask=mask, other=0.0).to(ACC)
        plus_of += g * tl.load(out_plus + at, mask=mask, other=0.0).to(ACC)
    delta = tl.sum(all_of, 1)
    d_dst = (1.0 - slope) * (tl.sum(plus_of, 1) - delta * share)
    tl.store(grad_a_dst + row * G_DST + head, d_dst.to(grad_a_dst.dtype.element_ty), mask=valid)
    at_stats = row * (3 * H) + head
    tl.store(stats + at_stats, score, mask=valid)
    tl.store(stats + at_stats + H, lse, mask=valid)
    tl.store(stats + at_stats + 2 * H, delta, mask=valid)


@dataclass(frozen=True)
class RowGradientLaunch:
    """Launch parameters: items (a row and a head) of a tile, features that it takes at a time, warps."""

    items: int
    block_width: int
    num_warps: int = 4


def choose_row_gradient_launch(width: int) -> RowGradientLaunch:
    """All features of a head at a time, a thousand elements to a tile.

    A head of 40 features is padded to 64 in it; five steps of 8 would leave no lane idle, but a lane's bytes would no
    longer lie beside its neighbour's. Not measured.
    """
    block_width = next_power_of_2(width)
    return RowGradientLaunch(max(1, 1024 // block_width), block_width)


def one_head(grad: Tensor) -> tuple[Tensor, bool]:
    """``(grad [..., N, D], True)`` where one row is seen by every head, as it is behind a sum over heads.

    Otherwise ``(contiguous grad [..., N, H, D], False)``.
    """
    if grad.shape[-2] > 1 and grad.stride(-2) == 0 and grad.select(-2, 0).is_contiguous():
        return grad.select(-2, 0), True
    return grad.contiguous(), False


def attention_row_gradient_triton(
    grad: Tensor, out: Tensor, out_plus: Tensor, alpha_plus: Tensor, a_dst: Tensor, log_sum: Tensor, slope: float,
    into: Tensor | None = None, launch: RowGradientLaunch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(stats [..., N, 3, H], grad_a_dst [..., N, H])``; stats are a_dst, log_sum and delta = <grad, out>.

    The gradient is written ``into`` columns of a wider matrix where they are given.
    """
    H, D = grad.shape[-2:]
    stats = log_sum.new_empty(*log_sum.shape[:-1], 3, H)
    grad_a_dst = torch.empty_like(a_dst, memory_format=torch.contiguous_format) if into is None else into
    rows = log_sum.numel() // H
    if rows:
        grad, shared = one_head(grad)
        (a_dst, s_dst), (_, g_dst) = spaced_rows(a_dst, 1), spaced_rows(grad_a_dst, 1)
        launch = launch or choose_row_gradient_launch(D)
        _row_gradient_kernel[(-(-rows * H // launch.items),)](
            grad, out, out_plus, alpha_plus, a_dst, log_sum, stats, grad_a_dst, rows * H, slope,
            H=H, D=D, S_DST=s_dst, G_DST=g_dst, SHARED=shared, ACC=triton_acc(grad.dtype),
            BN=launch.items, BD=launch.block_width, num_warps=launch.num_warps,
        )  # fmt: skip
    return stats, grad_a_dst


def attention_backward_triton(
    grad: Tensor, x: Tensor, a_src: Tensor, stats: Tensor, slope: float, rate: Tensor | None, clock: Tensor | None,
    site: int, back: Walk, launch: GatherLaunch | None = None, into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(grad_x [..., M, H, D], grad_a_src [..., M, H])`` by passes over the transpose, written ``into`` if given."""
    M, H, D = x.shape[-3:]
    contiguous = torch.contiguous_format
    grad_x, grad_a = into or (
        torch.empty_like(x, memory_format=contiguous),
        torch.empty_like(a_src, memory_format=contiguous),
    )
    if not grad_x.numel():
        return grad_x, grad_a
    grad, shared = one_head(grad)
    (x, s_x), (_, g_x), (_, g_src) = spaced_rows(x, 2), spaced_rows(grad_x, 2), spaced_rows(grad_a, 1)
    weights, loss, part = coefficients_back(flatten_tasks(stats, 3), a_src, slope, rate, clock, site, back)
    if back.work.hub_of_partial.numel():
        add_hub_parts(part, back.work, loss, M, H)
    gather(
        grad, D if shared else H * D, shared, weights, H, D, back, True, grad_x, g_x, own=x, own_spacing=s_x,
        loss=loss, grad_a=grad_a, grad_a_spacing=g_src, slope=slope, launch=launch,
    )  # fmt: skip
    return grad_x, grad_a
