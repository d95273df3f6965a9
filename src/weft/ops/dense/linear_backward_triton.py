"""Triton kernel of ``linear.py``, backward: all gradients of a dense layer in one pass over its rows.

    g       = grad through dropout and activation            [N, O]   written only on request
    grad_x  = g W (+ passed)                                 [N, I]
    grad_W  = g^T x                                          [O, I]   inner dimension N: split over the whole device
    grad_b  = column sums of g                               [O]

As separate kernels, ``g`` would be written once and read twice, and cuBLAS would give the tall product ``g^T x`` few
tiles. Programs loop over ranges of rows and keep their part of ``grad_W`` and ``grad_b`` in registers; the parts are
added in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.dense.linear_triton import float32_precision, tall_precision
from weft.ops.dense.partial_sums_triton import add_parts
from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.device_limits import H200, DeviceLimits, limits_of
from weft.ops.launch.launch import per_task_stride
from weft.ops.launch.triton_lang import tl, triton
from weft.ops.random.triton_bits import keep_scale, mask_row, mix_key


@triton.jit
def _linear_backward_kernel(
    grad, out, x, weight, passed, rate, clock, grad_in, grad_x, partial, N, rows_per_program, site, rows_x, rows_weight,
    stride_rate, stride_clock,
    I: tl.constexpr, O: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr, WANT_IN: tl.constexpr,
    WANT_X: tl.constexpr, HAS_PASSED: tl.constexpr, PRECISION: tl.constexpr, TALL: tl.constexpr,
    BN: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    o = tl.arange(0, BO)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    # Rows times a constant width: a stride known only at run time would cost the loads their alignment.
    grad += task * N * O
    out += task * N * O
    grad_in += task * N * O
    x += task * rows_x * I
    passed += task * N * I
    grad_x += task * N * I
    weight += task * rows_weight * I
    first = part * rows_per_program
    last = tl.minimum(first + rows_per_program, N)
    scale = tl.full([], 1.0, tl.float32)
    fraction = tl.zeros([], tl.float32)
    key = tl.zeros([], tl.uint64)
    if DROP:
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
        scale = tl.div_rn(1.0, 1.0 - fraction)
        key = mix_key(clock + task * stride_clock, site)
    if WANT_X:
        w = tl.load(weight + o[:, None] * I + i[None, :], mask=(o < O)[:, None] & (i < I)[None, :], other=0.0)
    sum_w = tl.zeros([BO, BI], tl.float32)
    sum_b = tl.zeros([BO], tl.float32)
    for base in range(first, last, BN):
        n = base + tl.arange(0, BN)
        row = n.to(tl.int64)
        mask_o = (n < last)[:, None] & (o < O)[None, :]
        mask_i = (n < last)[:, None] & (i < I)[None, :]
        at_o = row[:, None] * O + o[None, :]
        at_i = row[:, None] * I + i[None, :]
        g = tl.load(grad + at_o, mask=mask_o, other=0.0).to(tl.float32)
        if ACT == "relu":
            # A kept and active element is a positive output: no need to draw the mask again.
            g = tl.where(tl.load(out + at_o, mask=mask_o, other=0.0) > 0.0, g * scale, 0.0)
        else:
            if DROP:
                g *= keep_scale(mask_row(key, row)[:, None], fraction, o[None, :])
            if ACT == "elu":
                activated = tl.load(out + at_o, mask=mask_o, other=0.0).to(tl.float32) / scale
                g = tl.where(activated > 0.0, g, g * (activated + 1.0))
        sum_b += tl.sum(g, 0)
        v = tl.load(x + at_i, mask=mask_i, other=0.0)
        g = g.to(v.dtype)
        if WANT_IN:
            tl.store(grad_in + at_o, g, mask=mask_o)
        sum_w = tl.dot(tl.trans(g), v, sum_w, input_precision=TALL)
        if WANT_X:
            back = tl.zeros([BN, BI], tl.float32)
            if HAS_PASSED:
                back += tl.load(passed + at_i, mask=mask_i, other=0.0).to(tl.float32)
            back = tl.dot(g, w, back, input_precision=PRECISION)
            tl.store(grad_x + at_i, back.to(grad_x.dtype.element_ty), mask=mask_i)
    mine = partial + (task * tl.num_programs(0) + part) * (O * (I + 1))
    tl.store(mine + o[:, None] * I + i[None, :], sum_w, mask=(o < O)[:, None] & (i < I)[None, :])
    if tl.program_id(1) == 0:
        tl.store(mine + O * I + o, sum_b, mask=o < O)


@dataclass(frozen=True)
class LinearBackwardLaunch:
    """Launch parameters: rows per step, inputs per tile, target number of programs, warps, stages."""

    block_rows: int = 64
    block_in: int = 64
    programs: int = H200.programs(2)
    num_warps: int = 4
    num_stages: int = 2


def shared_bytes(launch: LinearBackwardLaunch, num_out: int, itemsize: int, wants_x: bool) -> int:
    """At most so much shared memory: two tiles of outputs and one of inputs in every stage, and the weights."""
    out = max(16, next_power_of_2(num_out))
    step = launch.block_rows * (2 * out + launch.block_in) * itemsize
    return launch.num_stages * step + (out * launch.block_in * itemsize if wants_x else 0)


def term_bytes(dtype: torch.dtype) -> int:
    """Bytes of a number in shared memory: with float32's accuracy it is three parts in bfloat16."""
    return 6 if dtype == torch.float32 and tall_precision() == "bf16x6" else dtype.itemsize


def steps(num_in: int, itemsize: int) -> tuple[tuple[int, int], ...]:
    """Rows and stages to be tried, the best first (H200, 169,343 rows, 16 and 32 tasks)."""
    if itemsize == 2:
        return (128, 2), (64, 3), (64, 2), (32, 2), (32, 1), (16, 1)
    if itemsize == 6:
        return ((32, 3), (64, 1), (32, 1), (16, 1)) if num_in > 64 else ((64, 1), (32, 3), (32, 1), (16, 1))
    return (64, 2), (32, 2), (32, 1), (16, 1)


def choose_launch(
    num_in: int, num_out: int, itemsize: int = 4, wants_x: bool = True, limits: DeviceLimits = H200
) -> LinearBackwardLaunch | None:
    """All inputs in one tile, so that ``g`` is computed once, and as many rows per step as the shared memory holds.

    ``itemsize``: bytes per term in shared memory, see :func:`term_bytes`. None if not even few rows fit.
    """
    block_in = min(128, max(16, next_power_of_2(num_in)))
    for rows, stages in steps(num_in, itemsize):
        launch = LinearBackwardLaunch(rows, block_in, limits.programs(2), num_stages=stages)
        if shared_bytes(launch, num_out, itemsize, wants_x) <= limits.shared_memory_per_block:
            return launch
    return None


def linear_backward_triton(
    grad: Tensor, out: Tensor | None, x: Tensor, weight: Tensor, passed: Tensor | None, act: str, rate: Tensor | None,
    clock: Tensor | None, site: int, wants_in: bool, wants_x: bool, launch: LinearBackwardLaunch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(g [..., N, O], grad_x [..., N, I], grad_W [..., O, I], grad_b [..., O])``; gradients not requested are empty.

    ``grad, out [..., N, O]``, ``x [..., N, I]`` or shared ``[N, I]``, ``weight [..., O, I]`` or shared.
    """
    N, I = x.shape[-2:]
    O = weight.shape[-2]
    lead = grad.shape[:-2]
    tasks = lead.numel()
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    single = x.dtype == torch.float32
    launch = launch or choose_launch(I, O, term_bytes(x.dtype), wants_x, limits_of(x.device))
    assert launch is not None, "call choose_launch first: no launch fits the shared memory"
    tiles = -(-I // launch.block_in)
    parts = max(1, min(launch.programs // max(1, tiles * tasks), -(-N // (2 * launch.block_rows))))
    steps = -(-N // (parts * launch.block_rows))
    rows = steps * launch.block_rows
    parts = -(-N // rows)
    grad_in = x.new_empty(*lead, N, O) if wants_in else x.new_empty(0)
    grad_x = x.new_empty(*lead, N, I) if wants_x else x.new_empty(0)
    partial = torch.empty(tasks, parts, O * (I + 1), dtype=torch.float32, device=x.device)
    _linear_backward_kernel[(parts, tiles, tasks)](
        grad, grad if out is None else out.contiguous(), x, weight, x if passed is None else passed.contiguous(),
        x if rate is None else rate.contiguous(), x if clock is None else clock.contiguous(), grad_in, grad_x, partial,
        N, rows, site, per_task_stride(x, tasks, N * I) // I, per_task_stride(weight, tasks, O * I) // I,
        per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
        I=I, O=O, ACT=act, DROP=rate is not None, WANT_IN=wants_in, WANT_X=wants_x, HAS_PASSED=passed is not None,
        PRECISION=float32_precision() if single else "tf32", TALL=tall_precision() if single else "tf32",
        BN=launch.block_rows, BO=max(16, next_power_of_2(O)), BI=launch.block_in,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    grad_weight, grad_bias = add_parts(partial, (O * I, O), x.dtype)
    return grad_in, grad_x, grad_weight.reshape(*lead, O, I), grad_bias.reshape(*lead, O)
