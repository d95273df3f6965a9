"""Triton kernels of ``dropout.py``: bias, activation and dropout, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.lang import tl, triton
from weft.ops.random_triton import keep_scale, mix_key

BLOCK = 1024


@triton.jit
def _forward_kernel(
    x, bias, rate, clock, out, count, F, site, stride_bias, stride_rate, stride_clock,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    value = tl.load(x + task * count + element, mask=inside, other=0.0).to(ACC)
    if HAS_BIAS:
        value += tl.load(bias + task * stride_bias + element % F, mask=inside, other=0.0).to(ACC)
    if ACT == "relu":
        # A comparison that NaN passes: a diverged value must stay visible.
        value = tl.where(value <= 0.0, 0.0, value)
    elif ACT == "elu":
        value = tl.where(value > 0.0, value, tl.exp(value) - 1.0)
    if DROP:
        key = mix_key(clock + task * stride_clock, site)
        value *= keep_scale(key, tl.load(rate + task * stride_rate).to(tl.float32), element).to(ACC)
    tl.store(out + task * count + element, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad, out, rate, clock, grad_x, count, site, stride_rate, stride_clock,
    ACT: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    value = tl.load(grad + task * count + element, mask=inside, other=0.0).to(ACC)
    if ACT == "relu":
        # A kept and active element is a positive output: no need to draw the mask again.
        active = tl.load(out + task * count + element, mask=inside, other=0.0) > 0.0
        if DROP:
            value *= (1.0 / (1.0 - tl.load(rate + task * stride_rate).to(tl.float32))).to(ACC)
        value = tl.where(active, value, 0.0)
    else:
        if DROP:
            fraction = tl.load(rate + task * stride_rate).to(tl.float32)
            scale = keep_scale(mix_key(clock + task * stride_clock, site), fraction, element).to(ACC)
            value *= scale
        if ACT == "elu":
            activated = tl.load(out + task * count + element, mask=inside, other=0.0).to(ACC)
            if DROP:
                activated *= (1.0 - fraction).to(ACC)
            value = tl.where(activated > 0.0, value, value * (activated + 1.0))
    tl.store(grad_x + task * count + element, value.to(grad_x.dtype.element_ty), mask=inside)


def _tasks(x: Tensor, rate: Tensor | None, clock: Tensor | None, bias: Tensor | None) -> int:
    """How many leading elements of ``x`` are tasks: what the clock or the bias says."""
    lead = clock.shape[:-1] if clock is not None else bias.shape[:-1] if bias is not None else ()
    return int(torch.Size(lead).numel())


def _stride(value: Tensor | None, tasks: int, width: int) -> int:
    """Elements between two tasks' values, 0 where they share one."""
    return width if value is not None and tasks > 1 and value.numel() == tasks * width else 0


def bias_act_dropout_triton(
    x: Tensor, bias: Tensor | None, act: str, rate: Tensor | None, clock: Tensor | None, site: int
) -> Tensor:
    """Launch the forward over ``x [..., N, F]``."""
    x = x.contiguous()
    out = torch.empty_like(x)
    tasks = _tasks(x, rate, clock, bias)
    count, width = x.numel() // max(tasks, 1), x.shape[-1]
    if x.numel():
        _forward_kernel[(-(-count // BLOCK), tasks)](
            x, x if bias is None else bias.contiguous(), x if rate is None else rate.contiguous(),
            x if clock is None else clock.contiguous(), out, count, width, site,
            _stride(bias, tasks, width), _stride(rate, tasks, 1), _stride(clock, tasks, 2),
            HAS_BIAS=bias is not None, ACT=act, DROP=rate is not None,
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32, BLOCK=BLOCK,
        )  # fmt: skip
    return out


def bias_act_dropout_backward_triton(
    grad: Tensor, out: Tensor, act: str, rate: Tensor | None, clock: Tensor | None, site: int
) -> Tensor:
    """Launch the backward; the mask is recomputed from the clock."""
    grad, out = grad.contiguous(), out.contiguous()
    grad_x = torch.empty_like(grad)
    tasks = _tasks(grad, rate, clock, None)
    count = grad.numel() // max(tasks, 1)
    if grad.numel():
        _backward_kernel[(-(-count // BLOCK), tasks)](
            grad, out, grad if rate is None else rate.contiguous(), grad if clock is None else clock.contiguous(),
            grad_x, count, site, _stride(rate, tasks, 1), _stride(clock, tasks, 2),
            ACT=act, DROP=rate is not None,
            ACC=tl.float64 if grad.dtype == torch.float64 else tl.float32, BLOCK=BLOCK,
        )  # fmt: skip
    return grad_x
