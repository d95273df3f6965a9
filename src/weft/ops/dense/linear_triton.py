"""Triton kernel of ``linear.py``: a product over many rows with its epilogue fused.

float32 operands go through three tf32 products per term (``tf32x3``), which keeps float32's accuracy on the tensor
cores: measured on an H200 for 169,343 rows, 64 to 64, 0.032 ms with relative error 1.3e-7 against the library's
0.056 ms and 1.5e-7; for 128 to 64, 0.056 ms against 0.092. Where the inner dimension is the rows (weight gradients)
operands would have to be transposed for tf32; bfloat16 parts need not: six products of them per term have
float32's accuracy (1.3e-7), three are a hundred times better than tf32 (4.5e-6).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.dense.activation_triton import activate
from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.launch import common_lead, per_task_stride
from weft.ops.launch.triton_lang import tl, triton
from weft.ops.random.triton_bits import keep_scale, mask_row, mix_key


@triton.jit
def _finish(
    total, bias, add, rate, clock, out, task, N, row, inside, o, site, stride_bias, stride_rate, stride_clock,
    O: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """The epilogue of the product, for the outputs ``o`` of some rows."""
    mask = inside[:, None] & (o < O)[None, :]
    at = (task * N + row)[:, None] * O + o[None, :]
    if HAS_BIAS:
        total += tl.load(bias + task * stride_bias + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    if HAS_ADD:
        total += tl.load(add + at, mask=mask, other=0.0).to(tl.float32)
    total = activate(total, ACT)
    if DROP:
        key = mix_key(clock + task * stride_clock, site)
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
        total *= keep_scale(mask_row(key, row)[:, None], fraction, o[None, :])
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _linear_kernel(
    x, weight, bias, add, rate, clock, out, N, site, rows_x, rows_weight, stride_bias, stride_rate, stride_clock,
    I: tl.constexpr, O: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr, ACT: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of BO outputs; with BE > 0 all outputs, the last of them in a narrow tile beside, so that x is read once.

    Inputs up to WHOLE are processed in steps of BK, the few after them in a narrow one.
    """
    task = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    row = n.to(tl.int64)
    inside = n < N
    # Rows times a constant width: a stride known only at run time would cost the loads their alignment.
    x += task * rows_x * I
    weight += task * rows_weight * I
    total = tl.zeros([BN, BO], tl.float32)
    if BE > 0:
        e = BO + tl.arange(0, BE)
        extra = tl.zeros([BN, BE], tl.float32)
    for first in range(0, WHOLE, BK):
        k = first + tl.arange(0, BK)
        left = tl.load(x + row[:, None] * I + k[None, :], mask=inside[:, None] & (k < WHOLE)[None, :], other=0.0)
        right = tl.load(weight + o[None, :] * I + k[:, None], mask=(o < O)[None, :] & (k < WHOLE)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        if BE > 0:
            right = tl.load(
                weight + e[None, :] * I + k[:, None], mask=(e < O)[None, :] & (k < WHOLE)[:, None], other=0.0
            )
            extra = tl.dot(left, right, extra, input_precision=PRECISION)
    if WHOLE < I:
        j = WHOLE + tl.arange(0, 16)
        left = tl.load(x + row[:, None] * I + j[None, :], mask=inside[:, None] & (j < I)[None, :], other=0.0)
        right = tl.load(weight + o[None, :] * I + j[:, None], mask=(o < O)[None, :] & (j < I)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        if BE > 0:
            right = tl.load(weight + e[None, :] * I + j[:, None], mask=(e < O)[None, :] & (j < I)[:, None], other=0.0)
            extra = tl.dot(left, right, extra, input_precision=PRECISION)
    _finish(
        total, bias, add, rate, clock, out, task, N, row, inside, o, site, stride_bias, stride_rate, stride_clock,
        O, HAS_BIAS, HAS_ADD, ACT, DROP,
    )  # fmt: skip
    if BE > 0:
        _finish(
            extra, bias, add, rate, clock, out, task, N, row, inside, e, site, stride_bias, stride_rate, stride_clock,
            O, HAS_BIAS, HAS_ADD, ACT, DROP,
        )  # fmt: skip


@dataclass(frozen=True)
class LinearLaunch:
    """Launch parameters: rows and outputs per tile, inputs per step, warps, stages, outputs of a narrow tile beside it."""

    block_rows: int
    block_out: int
    block_in: int
    num_warps: int = 4
    num_stages: int = 2
    block_extra: int = 0


def choose_launch(num_in: int, num_out: int) -> LinearLaunch:
    """One step for a narrow input, steps of 32 for a wide one (measured, see the module's docstring).

    A few outputs more than 64 (4 heads of 16 and their scores) are computed in a narrow tile beside: 169,343 rows, 128 to 72,
    0.073 ms on an H200 against 0.100 in two tiles of 64.
    """
    block_out = max(16, next_power_of_2(num_out))
    whole, extra = whole_inputs(num_in), extra_outputs(num_out)
    if extra:
        return LinearLaunch(64, 64, min(32, max(16, next_power_of_2(whole))), num_stages=3, block_extra=extra)
    if whole <= 64:
        return LinearLaunch(64, min(128, block_out), max(16, next_power_of_2(whole)))
    return LinearLaunch(128, min(64, block_out), 32, num_warps=8, num_stages=3)


def whole_inputs(num_in: int) -> int:
    """Inputs in whole steps; the others are the few beyond a multiple of 32."""
    return num_in - num_in % 32 if num_in > 32 and 0 < num_in % 32 <= 16 else num_in


def extra_outputs(num_out: int) -> int:
    """Width of a narrow tile beside one of 64 that takes all outputs; 0 if it would not be faster."""
    return 16 if 64 < num_out <= 80 else 0


def float32_precision() -> str:
    """How float32 products are computed: through tf32 if torch is set to, else with float32's accuracy."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def tall_precision() -> str:
    """The same for products whose inner dimension is the rows: parts in bfloat16, six or three products per term."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "ieee"  # the interpreter has no such products
    return "bf16x6" if torch.get_float32_matmul_precision() == "highest" else "bf16x3"


def linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, add: Tensor | None = None, act: str = "none",
    rate: Tensor | None = None, clock: Tensor | None = None, site: int = 0, launch: LinearLaunch | None = None,
) -> Tensor:  # fmt: skip
    """``dropout(act(x W^T + bias + add))``: ``x [T, N, I]`` (or shared ``[N, I]``), ``weight [T, O, I]`` or ``[O, I]``."""
    N, I = x.shape[-2:]
    O = weight.shape[-2]
    lead = common_lead(x, weight)
    tasks = lead.numel()
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty(*lead, N, O)
    launch = launch or choose_launch(I, O)
    tiles = 1 if launch.block_extra else -(-O // launch.block_out)
    grid = (-(-N // launch.block_rows), tiles, tasks)
    if out.numel():
        _linear_kernel[grid](
            x, weight, x if bias is None else bias.contiguous(), x if add is None else add.contiguous(),
            x if rate is None else rate.contiguous(), x if clock is None else clock.contiguous(), out, N, site,
            per_task_stride(x, tasks, N * I) // max(I, 1), per_task_stride(weight, tasks, O * I) // max(I, 1), per_task_stride(bias, tasks, O),
            per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
            I=I, O=O, HAS_BIAS=bias is not None, HAS_ADD=add is not None, ACT=act, DROP=rate is not None,
            PRECISION=float32_precision() if x.dtype == torch.float32 else "tf32",
            WHOLE=whole_inputs(I), BN=launch.block_rows, BO=launch.block_out, BE=launch.block_extra, BK=launch.block_in,
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
    return out
