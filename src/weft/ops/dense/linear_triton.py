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

from weft.ops.dense.tiles_triton import activate, add_parts
from weft.ops.launch.backend import H200, DeviceLimits, limits_of, next_power_of_2
from weft.ops.launch.triton_lang import common_lead, per_task_stride, tl, triton
from weft.ops.random_bits_triton import keep_scale, mask_row, mix_key


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
    """A tile of BO outputs; with BE > 0 all outputs, the last of them in a second, narrow one, so that x is read once.

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
    """Launch parameters: rows and outputs per tile, inputs per step, warps, stages, outputs of a second, narrow tile."""

    block_rows: int
    block_out: int
    block_in: int
    num_warps: int = 4
    num_stages: int = 2
    block_extra: int = 0


def choose_launch(num_in: int, num_out: int) -> LinearLaunch:
    """One step for a narrow input, steps of 32 for a wide one (measured, see the module's docstring).

    A few outputs more than 64 (4 heads of 16 and their scores) are computed in a second, narrow tile: 169,343 rows,
    128 to 72, 0.073 ms on an H200 against 0.100 in two tiles of 64.
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
    """Width of a narrow tile after one of 64 that takes all outputs; 0 if it would not be faster."""
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


# ---- Triton kernel of ``linear.py``, backward: all gradients of a dense layer in one pass over its rows
#     g       = grad through dropout and activation            [N, O]   written only on request
#     grad_x  = g W (+ passed)                                 [N, I]
#     grad_W  = g^T x                                          [O, I]   inner dimension N: split over the whole device
#     grad_b  = column sums of g                               [O]
#
# As separate kernels, ``g`` would be written once and read twice, and cuBLAS would give the tall product ``g^T x``
# few tiles. Programs loop over ranges of rows and keep their part of ``grad_W`` and ``grad_b`` in registers; the
# parts are added in a fixed order.


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


def choose_backward_launch(
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
    launch = launch or choose_backward_launch(I, O, term_bytes(x.dtype), wants_x, limits_of(x.device))
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


# ---- Triton kernel of ``linear.py``: ``grad^T x`` as a split-K product, rows split over the whole device


@triton.jit
def _weight_grad_kernel(
    grad, x, partial, N, rows_x, rows_per_split,
    O: tl.constexpr, I: tl.constexpr, PRECISION: tl.constexpr, BO: tl.constexpr, BE: tl.constexpr, BI: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """One tile of the result over one range of rows; the ranges are added afterwards in a fixed order.

    With BE > 0 a tile has all outputs, the last of them in a second, narrow one, so that x is read once.
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
    block_extra: int = 0  # outputs of a second, narrow tile


def choose_weight_grad_launch(
    num_out: int, num_in: int, tasks: int = 1, limits: DeviceLimits = H200
) -> WeightGradLaunch:
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
    launch = choose_weight_grad_launch(O, I)
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
    launch = launch or choose_weight_grad_launch(O, I, tasks, limits_of(x.device))
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
