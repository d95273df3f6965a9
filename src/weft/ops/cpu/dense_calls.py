"""Calls of the CPU kernels for bias, activation and dropout.

Shapes: T tasks, N rows, M columns, E edges, F features, H heads, D features of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.ops.cpu.call_parts import Dropout, kernels_of, like
from weft.ops.cpu.threads import count_shares, run_shares
from weft.ops.launch.launch import once_for_all

ACTIVATION_CODE = {"none": 0, "relu": 1, "elu": 2}
WORK_OF_ACT = {"none": 8, "relu": 8, "elu": 16}  # multiply-adds that cost as much as one element


def bias_act_dropout(
    x: Tensor, bias: Tensor | None, act: str, rate: Tensor | None, clock: Tensor | None, site: int, parts: int = 1
) -> Tensor:
    """See :func:`weft.ops.dense.bias_act_dropout.bias_act_dropout_torch`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    lead = x.shape[:0] if clock is None else clock.shape[:-1]
    x = once_for_all(x, len(lead))
    random = Dropout(rate, clock, site, lead)
    B, has_bias = math.prod(lead), bias is not None
    bias = bias.contiguous() if has_bias else x
    groups = math.prod(bias.shape[:-1]) if has_bias else 1
    arguments = (
        out.data_ptr(), x.data_ptr(), x.numel(), bias.data_ptr(), *random.arguments, B, out.numel() // max(B, 1),
        x.shape[-1] // parts, groups, x.shape[-1], ACTIVATION_CODE[act], has_bias, random.active, like(x.dtype),
    )  # fmt: skip
    if out.numel():
        run_shares(kernels_of().epilogue_share, arguments, count_shares(WORK_OF_ACT[act] * out.numel()))
    return out


def bias_act_dropout_backward(
    grad: Tensor, out: Tensor, act: str, rate: Tensor | None, clock: Tensor | None, site: int, parts: int = 1
) -> Tensor:
    """See :func:`weft.ops.dense.bias_act_dropout.bias_act_dropout_backward_torch`."""
    grad, out = grad.contiguous(), out.contiguous()
    result = torch.empty_like(grad)
    lead = grad.shape[:0] if clock is None else clock.shape[:-1]
    random = Dropout(rate, clock, site, lead)
    B = math.prod(lead)
    arguments = (
        result.data_ptr(), grad.data_ptr(), out.data_ptr(), *random.arguments, B, grad.numel() // max(B, 1),
        grad.shape[-1] // parts, ACTIVATION_CODE[act], random.active, like(grad.dtype),
    )  # fmt: skip
    if result.numel():
        run_shares(kernels_of().epilogue_backward_share, arguments, count_shares(WORK_OF_ACT[act] * grad.numel()))
    return result
