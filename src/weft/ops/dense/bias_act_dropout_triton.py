"""Triton kernels of ``bias_act_dropout.py``: bias, activation and dropout, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.dense.column_sum import column_sum_triton
from weft.ops.dense.tiles_triton import activate, add_parts, drop_scale
from weft.ops.launch.backend import accumulate_dtype, limits_of, next_power_of_2
from weft.ops.launch.triton_lang import once_for_all, per_task_stride, tl, triton, triton_acc
from weft.ops.random.triton_bits import keep_scale, mask_row, mix_key

BLOCK = 1024


@triton.jit
def _forward_kernel(
    x, bias, out, count, rows_x, stride_bias,
    F: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Forward without dropout, element by element."""
    task = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    # Rows times a constant width: a stride known only at run time would cost the loads their alignment.
    value = tl.load(x + task * rows_x * F + element, mask=inside, other=0.0).to(ACC)
    if HAS_BIAS:
        value += tl.load(bias + task * stride_bias + element % F, mask=inside, other=0.0).to(ACC)
    tl.store(out + task * count + element, activate(value, ACT).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _forward_drop_kernel(
    x, bias, rate, clock, out, rows, rows_x, site, stride_bias, stride_rate, stride_clock,
    W: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, ACC: tl.constexpr,
    BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """With dropout: by the rows of the mask, W wide and PARTS to a row of ``x``, whose bits have a round in common."""
    task = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (row < rows)[:, None] & (column < W)[None, :]
    at = row[:, None] * W + column[None, :]
    value = tl.load(x + task * rows_x * W + at, mask=inside, other=0.0).to(ACC)
    if HAS_BIAS:
        own = (row % PARTS)[:, None] * W + column[None, :]
        value += tl.load(bias + task * stride_bias + own, mask=inside, other=0.0).to(ACC)
    row_key = mask_row(mix_key(clock + task * stride_clock, site), row)
    scale = keep_scale(row_key[:, None], tl.load(rate + task * stride_rate).to(tl.float32), column[None, :])
    value = activate(value, ACT) * scale.to(ACC)
    tl.store(out + task * rows * W + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad, out, rate, grad_x, count, stride_rate,
    ACT: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Backward without drawing the mask again: a kept and active element of relu is a positive output."""
    task = tl.program_id(1).to(tl.int64)
    element = task * count + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < (task + 1) * count
    value = tl.load(grad + element, mask=inside, other=0.0).to(ACC)
    if ACT == "relu":
        active = tl.load(out + element, mask=inside, other=0.0) > 0.0
        if DROP:
            value *= tl.div_rn(1.0, 1.0 - tl.load(rate + task * stride_rate).to(tl.float32)).to(ACC)
        value = tl.where(active, value, 0.0)
    elif ACT == "elu":
        activated = tl.load(out + element, mask=inside, other=0.0).to(ACC)
        value = tl.where(activated > 0.0, value, value * (activated + 1.0))
    tl.store(grad_x + element, value.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def _backward_drop_kernel(
    grad, out, rate, clock, grad_x, rows, site, stride_rate, stride_clock,
    W: tl.constexpr, ACT: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Backward by the rows of the mask, which is drawn again."""
    task = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (row < rows)[:, None] & (column < W)[None, :]
    at = (task * rows + row)[:, None] * W + column[None, :]
    fraction = tl.load(rate + task * stride_rate).to(tl.float32)
    row_key = mask_row(mix_key(clock + task * stride_clock, site), row)
    value = tl.load(grad + at, mask=inside, other=0.0).to(ACC)
    value *= keep_scale(row_key[:, None], fraction, column[None, :]).to(ACC)
    if ACT == "elu":
        activated = tl.load(out + at, mask=inside, other=0.0).to(ACC) * (1.0 - fraction).to(ACC)
        value = tl.where(activated > 0.0, value, value * (activated + 1.0))
    tl.store(grad_x + at, value.to(grad_x.dtype.element_ty), mask=inside)


def _mask_tile(width: int) -> dict[str, int]:
    """Rows and columns of a tile of a mask that is ``width`` wide: about BLOCK elements."""
    columns = min(BLOCK, next_power_of_2(width))
    return {"BN": BLOCK // columns, "BW": columns}


def _tasks(clock: Tensor | None, bias: Tensor | None) -> int:
    """The number of tasks, from the clock or the bias."""
    lead = clock.shape[:-1] if clock is not None else bias.shape[:-1] if bias is not None else ()
    return int(torch.Size(lead).numel())


def bias_act_dropout_triton(
    x: Tensor, bias: Tensor | None, act: str, rate: Tensor | None, clock: Tensor | None, site: int, parts: int = 1
) -> Tensor:
    """Launch the forward over ``x [..., N, F]``; an ``x`` that tasks share stays one in memory."""
    if bias is not None and clock is not None and bias.dim() > 1 and bias.shape[:-1] != clock.shape[:-1]:
        # Tasks that share a clock are one task to the mask and many to the bias: two passes.
        x, bias, act = bias_act_dropout_triton(x, bias, act, None, None, site), None, "none"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return out
    tasks = _tasks(clock, bias)
    count, width = x.numel() // tasks, x.shape[-1]
    x = once_for_all(x, clock.dim() - 1 if clock is not None else 0)
    shared = {"HAS_BIAS": bias is not None, "ACT": act, "ACC": triton_acc(x.dtype)}
    bias_or, stride_bias = x if bias is None else bias.contiguous(), per_task_stride(bias, tasks, width)
    stride_x = per_task_stride(x, tasks, count)
    if rate is None:
        _forward_kernel[(-(-count // BLOCK), tasks)](
            x, bias_or, out, count, stride_x // width, stride_bias, F=width, BLOCK=BLOCK, **shared
        )
        return out
    W = width // parts
    tile = _mask_tile(W)
    _forward_drop_kernel[(-(-count // (W * tile["BN"])), -(-W // tile["BW"]), tasks)](
        x, bias_or, rate.contiguous(), clock.contiguous(), out, count // W, stride_x // W, site,
        stride_bias, per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
        W=W, PARTS=parts, **tile, **shared,
    )  # fmt: skip
    return out


def bias_act_dropout_backward_triton(
    grad: Tensor, out: Tensor, act: str, rate: Tensor | None, clock: Tensor | None, site: int, parts: int = 1
) -> Tensor:
    """Launch the backward; the mask is recomputed from the clock."""
    grad, out = grad.contiguous(), out.contiguous()
    grad_x = torch.empty_like(grad)
    if not grad.numel():
        return grad_x
    tasks, acc = _tasks(clock, None), triton_acc(grad.dtype)
    count, W = grad.numel() // tasks, grad.shape[-1] // parts
    stride_rate = per_task_stride(rate, tasks, 1)
    if rate is None or act == "relu":
        _backward_kernel[(-(-count // BLOCK), tasks)](
            grad, out, grad if rate is None else rate.contiguous(), grad_x, count, stride_rate,
            ACT=act, DROP=rate is not None, ACC=acc, BLOCK=BLOCK,
        )  # fmt: skip
        return grad_x
    tile = _mask_tile(W)
    _backward_drop_kernel[(-(-count // (W * tile["BN"])), -(-W // tile["BW"]), tasks)](
        grad, out, rate.contiguous(), clock.contiguous(), grad_x, count // W, site,
        stride_rate, per_task_stride(clock, tasks, 2), W=W, ACT=act, ACC=acc, **tile,
    )  # fmt: skip
    return grad_x


@triton.jit
def _backward_bias_kernel(
    grad, out, rate, clock, grad_x, partial, N, rows_per_program, site, stride_rate, stride_clock,
    F: tl.constexpr, W: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The backward of a range of rows, and the sum of its columns in the same pass."""
    part = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    first = part * rows_per_program
    last = tl.minimum(first + rows_per_program, N)
    scale = tl.full([], 1.0, ACC)
    if DROP:
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
        scale = tl.div_rn(1.0, 1.0 - fraction).to(ACC)
        key = mix_key(clock + task * stride_clock, site)
    total = tl.zeros([BN, BF], ACC)
    for base in range(first, last, BN):
        n = base + tl.arange(0, BN)
        mask = (n < last)[:, None] & (f < F)[None, :]
        at = (task * N + n.to(tl.int64))[:, None] * F + f[None, :]
        value = tl.load(grad + at, mask=mask, other=0.0).to(ACC)
        if ACT == "relu":
            # A kept and active element is a positive output: no need to draw the mask again.
            value = tl.where(tl.load(out + at, mask=mask, other=0.0) > 0.0, value * scale, 0.0)
        else:
            if DROP:
                value *= drop_scale(key, fraction, n.to(tl.int64), f, F, W).to(ACC)
            if ACT == "elu":
                activated = tl.load(out + at, mask=mask, other=0.0).to(ACC) / scale
                value = tl.where(activated > 0.0, value, value * (activated + 1.0))
        total += value
        tl.store(grad_x + at, value.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(partial + (task * tl.num_programs(0) + part) * F + f, tl.sum(total, 0), mask=f < F)


def bias_act_dropout_backward_bias_triton(
    grad: Tensor,
    out: Tensor,
    bias_shape: torch.Size,
    act: str,
    rate: Tensor | None,
    clock: Tensor | None,
    site: int,
    parts: int = 1,
) -> tuple[Tensor, Tensor]:
    """``(grad_x, grad_bias)`` in one pass: the columns are summed while they are in registers."""
    if clock is not None and clock.shape[:-1] != bias_shape[:-1]:
        grad_x = bias_act_dropout_backward_triton(grad, out, act, rate, clock, site, parts)
        return grad_x, column_sum_triton(grad_x.flatten(len(bias_shape) - 1, -2))
    grad, out = grad.contiguous(), out.contiguous()
    tasks, F = bias_shape[:-1].numel(), bias_shape[-1]
    N = grad.numel() // max(1, tasks * F)
    grad_x = torch.empty_like(grad)
    block_f = min(128, next_power_of_2(F))
    block_n = max(1, 2048 // block_f)
    rows = max(block_n, -(-N // limits_of(grad.device).programs(4)))
    programs = max(1, -(-N // rows))
    partial = grad.new_empty(tasks, programs, F, dtype=accumulate_dtype(grad.dtype))
    if grad.numel():
        _backward_bias_kernel[(programs, -(-F // block_f), tasks)](
            grad, out, grad if rate is None else rate.contiguous(), grad if clock is None else clock.contiguous(),
            grad_x, partial, N, rows, site, per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2),
            F=F, W=F // parts, ACT=act, DROP=rate is not None,
            ACC=triton_acc(grad.dtype), BN=block_n, BF=block_f, num_warps=4,
        )  # fmt: skip
    if not grad.numel():
        return grad_x, grad.new_zeros(bias_shape)
    return grad_x, add_parts(partial, (F, 0), grad.dtype)[0].reshape(bias_shape)
