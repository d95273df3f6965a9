"""The epilogue of a norm: activation and dropout, as arguments of its operator and inside its kernels.

The backward of both is computed from the activation's input, which the norm recomputes, and from the clock: neither an
output nor a mask is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.dense.bias_act_dropout import ACTIVATIONS
from weft.ops.dense.tiles_triton import activate, drop_scale
from weft.ops.launch.backend import limits_of, rate_and_clock
from weft.ops.launch.triton_lang import per_task_stride, tl, triton

EPILOGUE = "str act, Tensor? rate, Tensor? clock, int site, int parts=1"  # in a schema


class Epilogue(NamedTuple):
    """Activation and dropout after a norm; ``rate`` and ``clock`` are both None if nothing is dropped."""

    act: str = "none"
    rate: Tensor | None = None
    clock: Tensor | None = None
    site: int = 0
    parts: int = 1

    def constants(self, features: int) -> dict[str, Any]:
        """The constants of a kernel over rows of ``features`` numbers."""
        return {"W": features // self.parts, "ACT": self.act, "DROP": self.rate is not None}

    def arguments(self, tasks: int, instead: Tensor) -> tuple:
        """``(rate, clock, stride_rate, stride_clock)`` for a launch; without dropout any tensor, unread."""
        if self.rate is None or self.clock is None:
            return instead, instead, 0, 0
        rate, clock = self.rate.contiguous(), self.clock.contiguous()
        return rate, clock, per_task_stride(rate, tasks, 1), per_task_stride(clock, tasks, 2)


def checked_epilogue(
    operator: str, x: Tensor, lead: int, columns: Sequence[Tensor],
    act: str = "none", p: float | Tensor = 0.0, clock: Tensor | None = None, site: int = 0, parts: int = 1,
) -> Epilogue:  # fmt: skip
    """The epilogue of a norm that a user calls: ``act`` and what follows are those of ``bias_act_dropout``.

    ``columns`` are the parameters of the norm: kernels would read past those that are not ``[..., F]`` with the
    ``lead`` dimensions of ``x``. A clock is refused unless there is one wherever there are columns.
    """
    expected = (*x.shape[:lead], x.shape[-1])
    for value in columns:
        if tuple(value.shape) != expected:
            has = f"x {list(x.shape)} takes columns of shape {list(expected)}"
            raise InputError(f"{operator}: {has}, not {list(value.shape)}")
    if act not in ACTIVATIONS:
        raise InputError(f"{operator}: act={act!r} must be one of {', '.join(ACTIVATIONS)}")
    if clock is not None and clock.shape[:-1] != expected[:-1]:
        has = f"a clock of shape {list(clock.shape)} for columns of shape {list(expected)}"
        raise InputError(f"{operator}: {has}; give one clock per task, or share clock and columns")
    return Epilogue(act, *rate_and_clock(p, clock, x.device), site, parts)


def setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Save what a norm's backward pass reads: tensors, moments and epilogue; only ``out`` is differentiable."""
    *tensors, ctx.eps, ctx.act, rate, clock, ctx.site, ctx.parts = inputs
    ctx.save_for_backward(*tensors, *output[1:], rate, clock)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def ranges(N: int, block_n: int, device: torch.device) -> tuple[int, int]:
    """Rows of a range, whole tiles of them, and how many ranges there are, whatever the number of tasks."""
    rows = block_n * -(-N // (block_n * limits_of(device).programs(4)))
    return rows, -(-N // rows)


TILE = 2048  # elements of a norm's tile: 16 per thread


@triton.jit
def end(value, key, fraction, n, f, F: tl.constexpr, W: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr):
    """``dropout(act(value))`` of a tile."""
    value = activate(value, ACT)
    if DROP:
        value *= drop_scale(key, fraction, n, f, F, W).to(value.dtype)
    return value


@triton.jit
def end_backward(
    grad, value, key, fraction, n, f, F: tl.constexpr, W: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr
):
    """The gradient to ``value``, of which :func:`end` was taken, from that to its result."""
    if DROP:
        grad *= drop_scale(key, fraction, n, f, F, W).to(grad.dtype)
    if ACT == "relu":
        grad = tl.where(value > 0.0, grad, 0.0)
    elif ACT == "elu":
        grad = tl.where(value > 0.0, grad, grad * tl.exp(value))
    return grad
