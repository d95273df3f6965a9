"""Split-K operators as two operators each: the partial results, and their reduction.

A weight gradient, a bias gradient or a loss is split over the whole device and its parts are added in a second launch.
Only the update at the end of the step reads that sum; as an operator of its own it can be merged with any later launch,
instead of delaying the launches that follow.

Each ``*_parts`` runs all launches of its operator except the last, and returns ``partial [T, P, K]``; ``add_parts`` is
the last. If an operator launches nothing (on a CPU, or in a library), its whole result is the only part.

Shapes: T tasks, P parts, K results per task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.ops.dense.bias_act_dropout import (
    BACKWARD_BIAS_SCHEMA,
    bias_act_dropout_backward_bias_torch,
    bias_act_dropout_backward_bias_triton,
)
from weft.ops.dense.column_sum import column_sum_torch, column_sum_triton
from weft.ops.dense.cross_entropy import cross_entropy_parts_triton, cross_entropy_rows_torch
from weft.ops.dense.linear import BACKWARD_ARGUMENTS, linear_backward_torch, weight_grad_torch
from weft.ops.dense.linear_triton import choose_weight_grad_launch, linear_backward_triton, weight_grad_triton
from weft.ops.dense.tiles_triton import add_parts as add_parts_triton
from weft.ops.launch.backend import custom_op, limits_of, use_triton
from weft.weave.merged_launch import Launch, collected, launch_alone

LEAST_ROWS = 64  # below which a weight gradient is one tile's work


def _noted(launcher: Callable[[], Any]) -> tuple[list[Launch], Any]:
    with collected() as parts:
        out = launcher()
    return parts, out


def _taken(launcher: Callable[[], Any], summed: Callable[[Any], Tensor], make: bool) -> tuple[Any, Tensor]:
    """What ``launcher`` returns, and the parts of its last launch; ``make`` the launches before it, or skip them.

    ``summed`` picks, out of what it returns, the result of the reduction, ``[T, K]``: the only part if there is no
    reduction.
    """
    parts, out = _noted(launcher)
    adds = bool(parts) and "partial" in parts[-1].names and "first" in parts[-1].names
    for part in parts[: -1 if adds else None]:
        if make:
            launch_alone(part)
    if not adds:
        return out, summed(out)[:, None]
    return out, dict(zip(parts[-1].names, parts[-1].arguments, strict=True))["partial"]


def _flat(value: Tensor, keep: int) -> Tensor:
    """``[..., *rest]`` to ``[T, K]``, ``keep`` dimensions in ``rest``; memory of its own."""
    lead = value.shape[: value.dim() - keep].numel()
    return value.reshape(lead, -1).clone(memory_format=torch.contiguous_format)


# ---- weight_grad -------------------------------------------------------------------------------------------


def weight_grad_parts(grad: Tensor, x: Tensor, make: bool = True) -> Tensor:
    """Parts of ``grad^T x``, ``[T, P, O * I]``; without ``make`` they are allocated but not computed."""
    if not use_triton(x):
        return _flat(weight_grad_torch(grad, x), 2)[:, None]
    # Alone, a result much smaller than a tile goes to cuBLAS; in a merged launch the tile is free.
    suits = x.dtype != torch.float64 and x.shape[-2] >= LEAST_ROWS and grad.numel()
    sizes = (grad.shape[-1], x.shape[-1], grad.shape[:-2].numel())
    launch = choose_weight_grad_launch(*sizes, limits_of(x.device)) if suits else None
    return _taken(lambda: weight_grad_triton(grad, x, launch), lambda out: _flat(out, 2), make)[1]


@custom_op("weft::weight_grad_parts", mutates_args=(), schema="(Tensor grad, Tensor x) -> Tensor")
def _weight_grad_op(grad, x):
    return weight_grad_parts(grad, x)


@_weight_grad_op.register_fake
def _weight_grad_fake(grad, x):
    return weight_grad_parts(grad, x, make=False)


# ---- column_sum --------------------------------------------------------------------------------------------


def column_sum_parts(x: Tensor, make: bool = True) -> Tensor:
    """Parts of the sums over the rows of ``x [..., N, F]``, ``[T, P, F]``; ``make`` as above."""
    if not use_triton(x):
        return _flat(column_sum_torch(x), 1)[:, None]
    return _taken(lambda: column_sum_triton(x), lambda out: _flat(out, 1), make)[1]


@custom_op("weft::column_sum_parts", mutates_args=(), schema="(Tensor x) -> Tensor")
def _column_sum_op(x):
    return column_sum_parts(x)


@_column_sum_op.register_fake
def _column_sum_fake(x):
    return column_sum_parts(x, make=False)


# ---- bias_act_dropout_backward_bias --------------------------------------------------------------------------


def backward_bias_parts(grad, out, bias_shape, act, rate, clock, site, parts, make: bool = True):
    """The gradient to the epilogue's input, and parts of that to its bias, ``[T, P, F]``; ``make`` as above."""
    serve = bias_act_dropout_backward_bias_triton if use_triton(grad) else bias_act_dropout_backward_bias_torch
    given = grad, out, torch.Size(bias_shape), act, rate, clock, site, parts
    (grad_x, _), partial = _taken(lambda: serve(*given), lambda made: _flat(made[1], 1), make)
    return grad_x, partial


@custom_op("weft::bias_act_dropout_backward_bias_parts", mutates_args=(), schema=BACKWARD_BIAS_SCHEMA)
def _backward_bias_op(grad, out, bias_shape, act, rate, clock, site, parts=1):
    return backward_bias_parts(grad, out, bias_shape, act, rate, clock, site, parts)


@_backward_bias_op.register_fake
def _backward_bias_fake(grad, out, bias_shape, act, rate, clock, site, parts=1):
    return backward_bias_parts(grad, out, bias_shape, act, rate, clock, site, parts, make=False)


# ---- linear_backward -----------------------------------------------------------------------------------------


def linear_backward_parts(*given: Any, make: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """``(g, grad_x)`` and parts of ``(grad_W, grad_b)``, ``[T, P, O * I + O]``; ``make`` as above."""
    serve = linear_backward_triton if use_triton(given[2]) else linear_backward_torch

    def summed(made: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([_flat(made[2], 2), _flat(made[3], 1)], 1)

    (grad_in, grad_x, _, _), partial = _taken(lambda: serve(*given), summed, make)
    return grad_in, grad_x, partial


@custom_op("weft::linear_backward_parts", mutates_args=(), schema=f"{BACKWARD_ARGUMENTS} -> (Tensor, Tensor, Tensor)")
def _linear_backward_op(grad, out, x, weight, passed, act, rate, clock, site, wants_in, wants_x):
    return linear_backward_parts(grad, out, x, weight, passed, act, rate, clock, site, wants_in, wants_x)


@_linear_backward_op.register_fake
def _linear_backward_fake(grad, out, x, weight, passed, act, rate, clock, site, wants_in, wants_x):
    given = grad, out, x, weight, passed, act, rate, clock, site, wants_in, wants_x
    return linear_backward_parts(*given, make=False)


# ---- cross_entropy_rows --------------------------------------------------------------------------------------


def cross_entropy_parts(logits: Tensor, labels: Tensor, rows: Tensor, make: bool = True) -> Tensor:
    """Parts of the mean loss, ``[T, P, 1]``; ``make`` as above."""
    if not use_triton(logits):
        return _flat(cross_entropy_rows_torch(logits, labels, rows)[..., None], 1)[:, None]
    parts, partial = _noted(lambda: cross_entropy_parts_triton(logits, labels, rows))
    for part in parts if make else ():
        launch_alone(part)
    return partial


@custom_op(
    "weft::cross_entropy_rows_parts", mutates_args=(), schema="(Tensor logits, Tensor labels, Tensor rows) -> Tensor"
)
def _cross_entropy_op(logits, labels, rows):
    return cross_entropy_parts(logits, labels, rows)


@_cross_entropy_op.register_fake
def _cross_entropy_fake(logits, labels, rows):
    return cross_entropy_parts(logits, labels, rows, make=False)


# ---- the sum -------------------------------------------------------------------------------------------------


def add_parts_torch(partial: Tensor, first: int, second: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Reference: ``partial [T, P, first + second]`` to the sums ``[T, first]`` and ``[T, second]``."""
    total = partial[:, 0] if partial.shape[1] == 1 else partial.sum(1)
    one, other = total.to(dtype).split((first, second), 1)
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in (one, other))


@custom_op(
    "weft::add_parts", mutates_args=(), schema="(Tensor partial, int first, int second, str dtype) -> (Tensor, Tensor)"
)
def _add_parts_op(partial, first, second, dtype):
    return add_parts(partial, first, second, dtype)


def add_parts(partial: Tensor, first: int, second: int, dtype: str) -> tuple[Tensor, Tensor]:
    """``partial [T, P, first + second]`` summed over P: ``[T, first]`` and ``[T, second]`` of the type ``dtype``."""
    kind = getattr(torch, dtype)
    if use_triton(partial) and partial.numel():
        return add_parts_triton(partial, (first, second), kind)
    return add_parts_torch(partial, first, second, kind)


@_add_parts_op.register_fake
def _add_parts_fake(partial, first, second, dtype):
    return tuple(partial.new_empty(partial.shape[0], size, dtype=getattr(torch, dtype)) for size in (first, second))
