"""Shared parts of the attention kernels: lanes, their merging, hubs, and launch parameters.

A tile has L *lanes*: in the light half a lane is a row that meets its edges one by one, in the heavy half a lane
takes every L-th edge of one row. Either way a lane keeps a running maximum, a running denominator and the
weighted sums relative to that maximum; the lanes of a heavy row, and the chunks of a hub, are merged at the end.
Tiles are ``[L, BH, BD]``: lanes, heads, features of a head (both padded to powers of two).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.ops.csr.worklist import WorkList
from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import tl, triton, triton_acc


@triton.jit
def merge_lanes(top, total, acc):
    """Merge the lanes of one row: ``[L, ...]`` to ``[1, ...]`` in effect, returned without the lane axis."""
    best = tl.max(top, 0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    fade = tl.exp(top - shift[None, :])
    return best, tl.sum(total * fade, 0), tl.sum(acc * fade[:, :, None], 0)


@triton.jit
def finish_rows(out, log_sum, row, valid, h, d, H, D, top, total, acc):
    """Normalise and store rows: ``row, valid [L]``, sums ``[L, BH]`` and ``[L, BH, BD]``."""
    mask_h = valid[:, None] & (h < H)[None, :]
    mask_d = mask_h[:, :, None] & (d < D)[None, None, :]
    some = total > 0
    safe = tl.where(some, total, 1.0)
    at_h = row[:, None] * H + h[None, :]
    at_d = at_h[:, :, None] * D + d[None, None, :]
    share = 1.0 / safe
    tl.store(out + at_d, (acc * share[:, :, None]).to(out.dtype.element_ty), mask=mask_d)
    tl.store(log_sum + at_h, tl.where(some, top + tl.log(safe), 0.0), mask=mask_h)


@triton.jit
def merge_hubs_kernel(
    part_stats, part_acc, hub_ptr, hub_row, out, log_sum, num_partial, N,
    H: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one hub, L at a time and always in the same order."""
    hub = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    size_h = tl.num_programs(2).to(tl.int64) * num_partial * H
    top = tl.full([L, BH], float("-inf"), ACC)
    total = tl.zeros([L, BH], ACC)
    acc = tl.zeros([L, BH, BD], ACC)
    last = tl.load(hub_ptr + hub + 1)
    for first in range(tl.load(hub_ptr + hub), last, L):
        part = first + tl.arange(0, L)
        mask_h = (part < last)[:, None] & (h < H)[None, :]
        mask_d = mask_h[:, :, None] & (d < D)[None, None, :]
        at_h = (task * num_partial + part)[:, None] * H + h[None, :]
        at_d = at_h[:, :, None] * D + d[None, None, :]
        new_top = tl.load(part_stats + at_h, mask=mask_h, other=float("-inf"))
        higher = tl.maximum(top, new_top)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fade, gain = tl.exp(top - shift), tl.exp(new_top - shift)
        total = total * fade + gain * tl.load(part_stats + size_h + at_h, mask=mask_h, other=0.0)
        acc = acc * fade[:, :, None] + gain[:, :, None] * tl.load(part_acc + at_d, mask=mask_d, other=0.0)
        top = higher
    top_one, total_one, acc_one = merge_lanes(top, total, acc)
    one = tl.zeros([1], tl.int64)
    row = tl.load(hub_row + hub).to(tl.int64)
    finish_rows(
        out + task * N * H * D, log_sum + task * N * H, one + row, one == 0, h, d, H, D,
        top_one[None, :], total_one[None, :], acc_one[None, :, :],
    )  # fmt: skip


@triton.jit
def _add_hub_parts_kernel(
    partial, hub_ptr, hub_row, row_scale, out, num_partial, N,
    F: tl.constexpr, HAS_RS: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BF: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """``out[row of the hub] = sum of its parts [P, F]``, BP at a time and always in the same order.

    ADD: onto what is in ``out``.
    """
    hub = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    first = tl.load(hub_ptr + hub)
    last = tl.load(hub_ptr + hub + 1)
    row = tl.load(hub_row + hub).to(tl.int64)
    total = tl.zeros([BP, BF], ACC)
    for base in range(first, last, BP):
        slot = base + tl.arange(0, BP)
        at = partial + (task * num_partial + slot)[:, None] * F + f[None, :]
        total += tl.load(at, mask=(slot < last)[:, None] & in_f[None, :], other=0.0)
    sum_f = tl.sum(total, 0)
    if HAS_RS:
        sum_f *= tl.load(row_scale + row).to(ACC)
    if ADD:
        sum_f += tl.load(out + (task * N + row) * F + f, mask=in_f, other=0.0).to(ACC)
    tl.store(out + (task * N + row) * F + f, sum_f.to(out.dtype.element_ty), mask=in_f)


@dataclass(frozen=True)
class AttentionLaunch:
    """Launch parameters: lanes, heads and features of a tile, warps."""

    lanes: int
    block_heads: int
    block_width: int
    num_warps: int = 1


def choose_forward_launch(heads: int, width: int) -> AttentionLaunch:
    """One warp per tile of 512 elements and at least four lanes, so that the lanes of a row are merged in registers.

    Measured on an H200 (arxiv shape): 4 heads of 16, 0.16 ms against 0.36 with four warps on 1024 elements; 4 heads
    of 40, 0.73 ms with two heads per tile against 0.88 with all four.
    """
    block_width = next_power_of_2(width)
    block_heads = min(next_power_of_2(heads), max(1, 128 // block_width))
    lanes = max(1, min(32, 512 // (block_heads * block_width)))
    return AttentionLaunch(lanes, block_heads, block_width, max(1, min(8, block_heads * block_width // 512)))


def choose_backward_launch(heads: int, width: int) -> AttentionLaunch:
    """Four lanes over all heads that fit, 8 elements per thread.

    Measured on an H200 (arxiv shape, 4 heads of 40): 0.62 ms, against 0.68 with 16 elements and 1.9 with 32, which spill.
    """
    block_width = next_power_of_2(width)
    block_heads = min(next_power_of_2(heads), max(1, 512 // block_width))
    return AttentionLaunch(4, block_heads, block_width, max(1, min(8, block_heads * block_width // 64)))


def spaced_rows(value: Tensor, keep: int) -> tuple[Tensor, int]:
    """``value [..., N, *row]`` with ``keep`` dimensions in a row, and the elements from one row to the next.

    A slice of columns of a wider contiguous matrix needs no copy; anything else is made contiguous.
    """
    row = value.shape[value.dim() - keep :]
    dense = [row[dim + 1 :].numel() for dim in range(keep)]
    lead = value.dim() - keep
    spacing = value.stride(lead - 1) if lead else 0
    even = all(value.stride(dim) == value.stride(dim + 1) * value.shape[dim + 1] for dim in range(lead - 1))
    if list(value.stride()[lead:]) == dense and even and spacing >= row.numel():
        return value, spacing
    return value.contiguous(), row.numel()


def add_hub_parts(
    part: Tensor, work: WorkList, out: Tensor, num_rows: int, row_scale: Tensor | None = None, add: bool = False,
    block: int = 0,
) -> None:  # fmt: skip
    """Add the parts ``[T, P, F]`` of every hub into its row of ``out``; ``block``: features of a tile, if chosen."""
    tasks, num_partial, width = part.shape
    block = block or min(128, next_power_of_2(width))
    _add_hub_parts_kernel[(work.hub_row.numel(), -(-width // block), tasks)](
        part, work.hub_ptr, work.hub_row, part if row_scale is None else row_scale, out, num_partial, num_rows,
        F=width, HAS_RS=row_scale is not None, ACC=triton_acc(part.dtype), BP=16, BF=block, ADD=add, num_warps=4,
    )  # fmt: skip
