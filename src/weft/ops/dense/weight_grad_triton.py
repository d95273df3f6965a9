"""Triton kernel of ``linear.py``: ``grad^T x`` as a split-K product, rows split over the whole device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.dense.linear_triton import extra_outputs, tall_precision
from weft.ops.dense.partial_sums_triton import add_parts
from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.device_limits import H200, DeviceLimits, limits_of
from weft.ops.launch.triton_lang import tl, triton


@triton.jit
def _weight_grad_kernel(
    grad, x, partial, N, rows_x, rows_per_split,
    O: tl.constexpr, I: tl.constexpr, PRECISION: tl.constexpr, BO: tl.constexpr, BE: tl.constexpr, BI: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """One tile of the result over one range of rows; the ranges are added afterwards in a fixed order.

    With BE > 0 a tile has all outputs, the last of them in a narrow one beside it, so that x is read once.
    """
    # The widths are constants: a stride known only at run time would cost the loads their alignment.
    tiles_i: tl.constexpr = (I + BI - 1) // BI
    o = (tl.program_id(0) // tiles_i) * BO + tl.arange(0, BO)
    i = (tl.program_id(0) % tiles_i) * BI + tl.arange(0, BI)
    split = tl.program_id(1)
    task = tl.program_id(2).to(tl.int64)
    first = split * rows_per_split
    last = tl.minimum(first + rows_per_split, N)
    grad += task * N * O
    x += task * rows_x * I
    total = tl.zeros([BO, BI], tl.float32)
    if BE > 0:
        e = BO + tl.arange(0, BE)
        extra = tl.zeros([BE, BI], tl.float32)
    for base in range(first, last, BK):
        n = base + tl.arange(0, BK)
        row = n.to(tl.int64)
        g = tl.load(grad + row[:, None] * O + o[None, :], mask=(n < last)[:, None] & (o < O)[None, :], other=0.0)
        v = tl.load(x + row[:, None] * I + i[None, :], mask=(n < last)[:, None] & (i < I)[None, :], other=0.0)
        total = tl.dot(tl.trans(g), v, total, input_precision=PRECISION)
        if BE > 0:
            g = tl.load(grad + row[:, None] * O + e[None, :], mask=(n < last)[:, None] & (e < O)[None, :], other=0.0)
            extra = tl.dot(tl.trans(g), v, extra, input_precision=PRECISION)
    partial += (task * tl.num_programs(1) + split) * (O * I)
    tl.store(partial + o[:, None] * I + i[None, :], total, mask=(o < O)[:, None] & (i < I)[None, :])
    if BE > 0:
        tl.store(partial + e[:, None] * I + i[None, :], extra, mask=(e < O)[:, None] & (i < I)[None, :])


@dataclass(frozen=True)
class WeightGradLaunch:
    """Launch parameters: tile of the result, rows per step, target number of programs, warps."""

    block_out: int
    block_in: int
    block_rows: int = 32
    programs: int = H200.programs(4)
    num_warps: int = 4
    num_stages: int = 3
    precision: str = "ieee"  # of float32 products
    block_extra: int = 0  # outputs of a narrow tile beside


def choose_launch(num_out: int, num_in: int, tasks: int = 1, limits: DeviceLimits = H200) -> WeightGradLaunch:
    """A tile that covers a narrow layer whole, so that every row is read once.

    One task gets longer ranges of rows: 0.043 ms with 264 programs for 169,343 x 64 x 64 on an H200, against 0.047 with
    528 and cuBLAS's 0.051. Many inputs (16 tasks that share 169,343 x 128) gain by tensor cores: 0.052 ms per task in
    bfloat16 parts against 0.060 by multiply-adds. A few outputs more than 64 go into a narrow tile (0.088 ms for
    169,343 x 128 x 72 against 0.133 in two).
    """
    extra = extra_outputs(num_out)
    if num_in > 64 and tasks > 1 and not extra:
        block_out = min(64, max(16, next_power_of_2(num_out)))
        return WeightGradLaunch(block_out, 128, programs=limits.programs(4), precision=tall_precision())
    return WeightGradLaunch(
        programs=limits.programs(2 if tasks == 1 and not extra else 4),
        block_out=64 if extra else min(64, max(16, next_power_of_2(num_out))),
        block_in=min(64, max(16, next_power_of_2(num_in))),
        block_extra=extra,
    )


def suits(grad: Tensor, x: Tensor) -> bool:
    """Whether there are enough rows, and padding the result to tiles wastes little for one task alone."""
    if x.shape[-2] < 64:
        return False
    O, I = grad.shape[-1], x.shape[-1]
    launch = choose_launch(O, I)
    outputs = (
        launch.block_out + launch.block_extra if launch.block_extra else -(-O // launch.block_out) * launch.block_out
    )
    waste = outputs * -(-I // launch.block_in) * launch.block_in / max(1, O * I)
    if grad.shape[:-2].numel() > 1:
        return True
    # 580,768 x 1,323 x 64 on an H200: 2.58 ms against the library's 3.26; 20,000 x 3,703 x 16: 0.28 against 0.18.
    narrow = max(O, I) <= 256 or (O <= 64 and I <= 2048 and x.shape[-2] >= 1 << 17)
    one_tile = max(O, 16) * max(I, 16) <= 16 * 64  # bound by reading x, and cuBLAS takes 70 ms to start
    return (waste <= 1.8 or one_tile) and narrow and x.shape[-2] >= 16384


def weight_grad_triton(grad: Tensor, x: Tensor, launch: WeightGradLaunch | None = None) -> Tensor:
    """Launch over ``grad [..., N, O]`` and ``x [..., N, I]`` or ``[N, I]``; returns ``[..., O, I]`` in x's dtype.

    For narrow layers float32 is multiplied by plain multiply-adds: with an inner dimension of N the operands would have
    to be transposed for tf32, which costs more than it saves (16 tasks, 169,343 x 64 x 64 on an H200: 0.031 ms per task
    against 0.043 through three tf32 products and 0.034 through six of bfloat16 parts).
    """
    lead = grad.shape[:-2]
    if launch is None and (x.dtype == torch.float64 or not suits(grad, x)):
        return grad.transpose(-2, -1) @ x
    N, O, I = x.shape[-2], grad.shape[-1], x.shape[-1]
    g_TNO, x_TNI = grad.reshape(-1, N, O).contiguous(), x.reshape(-1, N, I).contiguous()
    tasks = g_TNO.shape[0]
    launch = launch or choose_launch(O, I, tasks, limits_of(x.device))
    tiles = (1 if launch.block_extra else -(-O // launch.block_out)) * -(-I // launch.block_in)
    splits = max(1, min(launch.programs // max(1, tiles * tasks), N // (4 * launch.block_rows)))
    rows = -(-N // splits)
    rows = -(-rows // launch.block_rows) * launch.block_rows
    splits = -(-N // rows)
    partial = torch.empty(tasks, splits, O, I, dtype=torch.float32, device=x.device)
    _weight_grad_kernel[(tiles, splits, tasks)](
        g_TNO, x_TNI, partial, N, N if x_TNI.shape[0] == tasks else 0, rows,
        O=O, I=I, PRECISION=launch.precision,
        BO=launch.block_out, BE=launch.block_extra, BI=launch.block_in, BK=launch.block_rows,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return add_parts(partial.flatten(2), (O * I, 0), x.dtype)[0].reshape(*lead, O, I)
