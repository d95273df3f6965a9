"""Bias, activation and counter-based dropout in one pass; plain dropout is the case without the others.

    out = keep / (1 - rate) * act(x + bias)        keep from (seed, step, site, element), see random_bits.py

The mask's row is n, with all dimensions of a task but the last flattened to rows, its column is f. Values without
columns (a task's stored values ``[Z]``) are rows of one.
``parts`` > 1 says that the last dimension is that many parts side by side (heads), each a row of the mask by itself.

Shapes: T tasks, N rows, F features; ``clock [..., 2]`` and ``rate [...]`` have the leading dimensions of a
task, so every task of a group has its own seed and its own rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import elu, relu

from weft.core.errors import InputError
from weft.ops import cpu
from weft.ops.dense.tiles_triton import activate, add_parts, drop_scale
from weft.ops.launch.backend import (
    accumulate_dtype,
    batch_tasks,
    by_device,
    custom_op,
    lead_task,
    limits_of,
    next_power_of_2,
    on_gpu,
    once_for_all,
    rate_and_clock,
    use_triton,
)
from weft.ops.launch.triton_lang import per_task_stride, tl, triton, triton_acc
from weft.ops.random_bits import keep_mask_rows
from weft.ops.random_bits_triton import keep_scale, mask_row, mix_key

# ---- column_sum: the sum over the rows of a tall matrix, which is the gradient of a bias
#     out[t, f] = sum over n of x[t, n, f]
#
# A library reduction reads 169,343 x 64 floats in 0.049 ms on an H200; splitting the rows over the whole device
# brings it to the speed of memory. Partial sums are added in a fixed order.


def column_sum_torch(x: Tensor) -> Tensor:
    """Reference."""
    return x.sum(-2)


@triton.jit
def _column_sum_kernel(
    x, partial, N, rows_per_program, F: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr
):
    part = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    first = part * rows_per_program
    last = tl.minimum(first + rows_per_program, N)
    total = tl.zeros([BN, BF], ACC)
    for base in range(first, last, BN):
        n = base + tl.arange(0, BN)
        at = (task * N + n)[:, None] * F + f[None, :]
        total += tl.load(x + at, mask=(n < last)[:, None] & (f < F)[None, :], other=0.0).to(ACC)
    tl.store(partial + (task * tl.num_programs(0) + part) * F + f, tl.sum(total, 0), mask=f < F)


def column_sum_triton(x: Tensor, programs: int | None = None) -> Tensor:
    """Launch over ``x [..., N, F]``: about eight programs per multiprocessor, so that many loads are in flight."""
    lead, (N, F) = x.shape[:-2], x.shape[-2:]
    x_TNF = x.reshape(lead.numel(), N, F).contiguous()
    tasks = x_TNF.shape[0]
    if x_TNF.numel() == 0:
        return x.sum(-2)
    block_f = min(128, next_power_of_2(F))
    block_n = 4096 // block_f
    programs = limits_of(x.device).programs(8) if programs is None else programs
    rows = max(block_n, -(-N // programs))
    parts = -(-N // rows)
    partial = x.new_empty(tasks, parts, F, dtype=accumulate_dtype(x.dtype))
    _column_sum_kernel[(parts, -(-F // block_f), tasks)](
        x_TNF, partial, N, rows, F=F,
        ACC=triton_acc(x.dtype), BN=block_n, BF=block_f, num_warps=4,
    )  # fmt: skip
    return add_parts(partial, (F, 0), x.dtype)[0].reshape(*lead, F)


_column_sum_op = custom_op("weft::column_sum", "(Tensor x) -> Tensor")(by_device(column_sum_triton, column_sum_torch))
_column_sum_op.register_fake(lambda x: x.new_empty(*x.shape[:-2], x.shape[-1]))
batch_tasks(_column_sum_op)


def column_sum(x: Tensor) -> Tensor:
    """Sum ``x [..., N, F]`` over its rows to ``[..., F]``. Not differentiable: it serves backward passes."""
    return _column_sum_op(x) if on_gpu(x) else x.sum(-2)


# ---- Triton kernels: bias, activation and dropout, forward and backward

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
    F: tl.constexpr, W: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
    BN: tl.constexpr, BF: tl.constexpr,
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


ACTIVATIONS = ("none", "relu", "elu")


def _per_task(values: Tensor, x: Tensor, lead: int) -> Tensor:
    """Reshape ``values [..lead.., *rest]`` so that its leading dimensions broadcast against ``x``."""
    return values.reshape(*values.shape[:lead], *(1,) * (x.dim() - values.dim()), *values.shape[lead:])


def _mask(x: Tensor, rate: Tensor, clock: Tensor, site: int, parts: int) -> Tensor:
    """``keep / (1 - rate)`` in the shape of ``x``; elements are counted inside one task."""
    lead = clock.dim() - 1
    columns = x.shape[-1] // parts
    rows = x[(0,) * lead].numel() // columns if x.numel() else 0
    keep = keep_mask_rows(rate.expand(clock.shape[:-1]), clock, site, rows, columns).reshape(x.shape)
    scale = (1.0 / (1.0 - rate.to(torch.float32))).expand(clock.shape[:-1])
    return torch.where(keep, _per_task(scale, x, lead), 0.0)


def bias_act_dropout_torch(
    x: Tensor, bias: Tensor | None, act: str, rate: Tensor | None, clock: Tensor | None, site: int, parts: int = 1
) -> Tensor:
    """Reference."""
    out = x if bias is None else x + (_per_task(bias, x, bias.dim() - 1) if bias.dim() > 1 else bias)
    out = relu(out) if act == "relu" else elu(out) if act == "elu" else out
    return out if rate is None else (out * _mask(x, rate, clock, site, parts)).to(x.dtype)


def bias_act_dropout_backward_torch(
    grad: Tensor, out: Tensor, act: str, rate: Tensor | None, clock: Tensor | None, site: int, parts: int = 1
) -> Tensor:
    """Reference: gradient to ``x`` from the saved *output*; the mask is recomputed, never stored."""
    dtype = out.dtype
    if rate is not None:
        mask = _mask(grad, rate, clock, site, parts)
        grad = grad * mask
        out = torch.where(mask > 0, out / mask, 0.0)
    if act == "relu":
        grad = torch.where(out > 0, grad, 0.0)
    elif act == "elu":
        grad = torch.where(out > 0, grad, grad * (out + 1.0))
    return grad.to(dtype)


@custom_op(
    "weft::bias_act_dropout",
    "(Tensor x, Tensor? bias, str act, Tensor? rate, Tensor? clock, int site, int parts=1) -> Tensor",
)
def _op(x, bias, act, rate, clock, site, parts=1):
    if use_triton(x):
        return bias_act_dropout_triton(x, bias, act, rate, clock, site, parts)
    if cpu.serves(x, bias):
        return cpu.bias_act_dropout(x, bias, act, rate, clock, site, parts)
    out = bias_act_dropout_torch(x, bias, act, rate, clock, site, parts)
    return out.clone() if out is x else out


@custom_op(
    "weft::bias_act_dropout_backward",
    "(Tensor grad, Tensor out, str act, Tensor? rate, Tensor? clock, int site, int parts=1) -> Tensor",
)
def _backward_op(grad, out, act, rate, clock, site, parts=1):
    if use_triton(grad):
        return bias_act_dropout_backward_triton(grad, out, act, rate, clock, site, parts)
    if cpu.serves(grad, out):
        return cpu.bias_act_dropout_backward(grad, out, act, rate, clock, site, parts)
    result = bias_act_dropout_backward_torch(grad, out, act, rate, clock, site, parts)
    return result.clone() if result is grad else result


def _setup(ctx, inputs, output):
    _, bias, ctx.act, rate, clock, ctx.site, ctx.parts = inputs
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.save_for_backward(output, rate, clock)


def _backward(ctx, grad):
    out, rate, clock = ctx.saved_tensors
    bias_shape = ctx.bias_shape if ctx.needs_input_grad[1] else None
    if torch.is_grad_enabled() and ctx.act == "none" and bias_shape is None:  # for a second derivative
        return _op(grad.contiguous(), None, "none", rate, clock, ctx.site, ctx.parts), *(None,) * 6
    grad_x, grad_bias = epilogue_gradients(grad, out, bias_shape, ctx.act, rate, clock, ctx.site, ctx.parts)
    return grad_x, grad_bias, None, None, None, None, None


def epilogue_gradients(
    grad: Tensor,
    out: Tensor,
    bias_shape: Sequence[int] | None,
    act: str,
    rate: Tensor | None,
    clock: Tensor | None,
    site: int,
    parts: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Gradients to the epilogue's input and to its bias, in as few passes as possible."""
    changes = act != "none" or rate is not None
    if bias_shape is None:
        return _backward_op(grad, out, act, rate, clock, site, parts) if changes else grad, None
    if changes and on_gpu(grad):
        return _backward_bias_op(grad, out, list(bias_shape), act, rate, clock, site, parts)
    grad_x = _backward_op(grad, out, act, rate, clock, site, parts) if changes else grad
    return grad_x, column_sum(grad_x.flatten(len(bias_shape) - 1, -2))


BACKWARD_BIAS_SCHEMA = (
    "(Tensor grad, Tensor out, int[] bias_shape, str act, Tensor? rate, Tensor? clock, int site, int parts=1)"
    " -> (Tensor, Tensor)"
)


@custom_op("weft::bias_act_dropout_backward_bias", BACKWARD_BIAS_SCHEMA)
def _backward_bias_op(grad, out, bias_shape, act, rate, clock, site, parts=1):
    shape = torch.Size(bias_shape)
    if use_triton(grad):
        return bias_act_dropout_backward_bias_triton(grad, out, shape, act, rate, clock, site, parts)
    return bias_act_dropout_backward_bias_torch(grad, out, shape, act, rate, clock, site, parts)


def bias_act_dropout_backward_bias_torch(
    grad, out, bias_shape, act, rate, clock, site, parts=1
) -> tuple[Tensor, Tensor]:
    """Reference: the gradient to ``x``, and its sum over everything that shares a bias."""
    grad_x = bias_act_dropout_backward_torch(grad, out, act, rate, clock, site, parts)
    return grad_x.clone(), grad_x.flatten(len(bias_shape) - 1, -2).sum(-2)


@_backward_bias_op.register_fake
def _backward_bias_fake(grad, out, bias_shape, act, rate, clock, site, parts=1):
    return torch.empty_like(grad, memory_format=torch.contiguous_format), grad.new_empty(bias_shape)


@_backward_bias_op.register_vmap
def _backward_bias_vmap(info, in_dims, grad, out, bias_shape, act, rate, clock, site, parts=1):
    size = info.batch_size
    grad, out = lead_task(grad, in_dims[0], size), lead_task(out, in_dims[1], size)
    rate, clock = lead_task(rate, in_dims[4], size), lead_task(clock, in_dims[5], size)
    shape = [size, *bias_shape]
    return _backward_bias_op(grad.contiguous(), out.contiguous(), shape, act, rate, clock, site, parts), (0, 0)


_op.register_autograd(_backward, setup_context=_setup)
batch_tasks(_op, shared=(1,), like=(0,))
batch_tasks(_backward_op, contiguous=(0, 1), like=(0,))


def bias_act_dropout(
    x: Tensor,
    bias: Tensor | None = None,
    act: str = "none",
    p: float | Tensor = 0.0,
    clock: Tensor | None = None,
    site: int = 0,
    parts: int = 1,
) -> Tensor:
    """``dropout(act(x + bias))`` over ``x [..., N, F]`` in one pass.

    ``act`` is one of ``"none"``, ``"relu"``, ``"elu"``. Without a ``clock``, or with ``p == 0.0``, nothing is
    dropped. ``p`` may be a tensor so that every task has its own rate. ``parts`` is how many heads stand side by
    side in F: the mask of a head's column does not depend on how wide the others are.
    """
    if act not in ACTIVATIONS:
        raise InputError(f"bias_act_dropout: act={act!r} must be one of {', '.join(ACTIVATIONS)}")
    rate, clock = rate_and_clock(p, clock, x.device)
    if rate is None and bias is None and act == "none":
        return x
    if clock is not None and bias is None and x.dim() == clock.dim():
        # One value per row: as columns of one row, their masks would be slices of one long sequence.
        return _op(x.unsqueeze(-1), None, act, rate, clock, site, parts).squeeze(-1)
    return _op(x, bias, act, rate, clock, site, parts)


def dropout(x: Tensor, p: float | Tensor, clock: Tensor, site: int = 0) -> Tensor:
    """Drop each element of ``x`` with probability ``p``; the mask depends on (seed, step), site, element."""
    return bias_act_dropout(x, None, "none", p, clock, site)


# ---- Dropout of rows that are part of a larger matrix: the mask is that of the whole matrix, from a given row on
#
# The fused operators count rows from 0. A rank that holds rows ``first`` to ``first + N`` of a matrix drops what one
# process would drop of them, so that a sharded run has the masks of a run on one device.


def dropout_rows(
    x: Tensor, p: float | Tensor, clock: Tensor | None, site: int, first: int = 0, parts: int = 1
) -> Tensor:
    """``keep / (1 - p) * x`` for ``x [N, F]`` or ``[Z]``, whose row 0 is row ``first`` of the whole.

    ``parts``: heads side by side in F, each a row of the mask by itself, as in :func:`weft.ops.bias_act_dropout`.
    """
    rate, clock = rate_and_clock(p, clock, x.device)
    if rate is None or clock is None or x.numel() == 0:
        return x
    columns = 1 if x.dim() == 1 else x.shape[-1] // parts
    rows_of_one = x[0].numel() // columns if x.dim() > 1 else 1
    keep = keep_mask_rows(rate, clock, site, x.numel() // columns, columns, first * rows_of_one).reshape(x.shape)
    scale = 1.0 / (1.0 - rate.to(torch.float32))
    return (x * torch.where(keep, scale, 0.0)).to(x.dtype)
