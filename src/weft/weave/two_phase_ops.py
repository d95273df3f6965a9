"""Split-K operators as two operators each: the partial results, and their reduction.

A weight gradient, a bias gradient or a loss is split over the whole device and its parts are added in a second launch.
Only the update at the end of the step reads that sum; as an operator of its own it can be merged with any later launch,
instead of delaying the launches that follow.

Each ``*_parts`` runs all launches of its operator except the last, and returns ``partial [T, P, K]``; ``add_parts`` is
the last. If an operator launches nothing (on a CPU, or in a library), its whole result is the only part. With
``launch=False`` results are allocated but not computed.

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
    column_sum_torch,
    column_sum_triton,
)
from weft.ops.dense.cross_entropy import cross_entropy_parts_triton, cross_entropy_rows_torch
from weft.ops.dense.linear import BACKWARD_ARGUMENTS, linear_backward_torch, weight_grad_torch
from weft.ops.dense.linear_triton import choose_weight_grad_launch, linear_backward_triton, weight_grad_triton
from weft.ops.dense.tiles_triton import add_parts as add_parts_triton
from weft.ops.launch.backend import custom_op, limits_of, use_triton
from weft.weave.merged_launch import collected

LEAST_ROWS = 64  # below which a weight gradient is one tile's work


def _first_phase(launcher: Callable[[], Any], summed: Callable[[Any], Tensor], launch: bool) -> tuple[Any, Tensor]:
    """What ``launcher`` returns, and the parts that its last launch would add; the launches before it are made.

    ``summed`` picks, out of what it returns, the result of the reduction, ``[T, K]``: the only part if there is no
    reduction.
    """
    with collected() as launches:
        out = launcher()
    adds = bool(launches) and "partial" in launches[-1].names and "first" in launches[-1].names
    for each in launches[: -1 if adds else None] if launch else ():
        each()
    if not adds:
        return out, summed(out)[:, None]
    return out, dict(zip(launches[-1].names, launches[-1].arguments, strict=True))["partial"]


def _flat(value: Tensor, dims: int) -> Tensor:
    """``[..., *rest]`` to ``[T, K]``, ``dims`` dimensions in ``rest``, as a copy."""
    lead = value.shape[: value.dim() - dims].numel()
    return value.reshape(lead, -1).clone(memory_format=torch.contiguous_format)


def weight_grad_parts(grad: Tensor, x: Tensor, *, launch: bool = True) -> Tensor:
    """Parts of ``grad^T x``, ``[T, P, O * I]``."""
    if not use_triton(x):
        return _flat(weight_grad_torch(grad, x), 2)[:, None]
    # Alone, a result much smaller than a tile goes to cuBLAS; in a merged launch the tile is free.
    suits = x.dtype != torch.float64 and x.shape[-2] >= LEAST_ROWS and grad.numel()
    sizes = (grad.shape[-1], x.shape[-1], grad.shape[:-2].numel())
    tiles = choose_weight_grad_launch(*sizes, limits_of(x.device)) if suits else None
    return _first_phase(lambda: weight_grad_triton(grad, x, tiles), lambda out: _flat(out, 2), launch)[1]


def column_sum_parts(x: Tensor, *, launch: bool = True) -> Tensor:
    """Parts of the sums over the rows of ``x [..., N, F]``, ``[T, P, F]``."""
    if not use_triton(x):
        return _flat(column_sum_torch(x), 1)[:, None]
    return _first_phase(lambda: column_sum_triton(x), lambda out: _flat(out, 1), launch)[1]


def backward_bias_parts(grad, out, bias_shape, act, rate, clock, site, parts=1, *, launch: bool = True):
    """The gradient to the epilogue's input, and parts of that to its bias, ``[T, P, F]``."""
    run = bias_act_dropout_backward_bias_triton if use_triton(grad) else bias_act_dropout_backward_bias_torch
    arguments = grad, out, torch.Size(bias_shape), act, rate, clock, site, parts
    (grad_x, _), partial = _first_phase(lambda: run(*arguments), lambda made: _flat(made[1], 1), launch)
    return grad_x, partial


def linear_backward_parts(*arguments: Any, launch: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """``(g, grad_x)`` and parts of ``(grad_W, grad_b)``, ``[T, P, O * I + O]``."""
    run = linear_backward_triton if use_triton(arguments[2]) else linear_backward_torch
    (grad_in, grad_x, _, _), partial = _first_phase(
        lambda: run(*arguments), lambda made: torch.cat([_flat(made[2], 2), _flat(made[3], 1)], 1), launch
    )
    return grad_in, grad_x, partial


def cross_entropy_parts(logits: Tensor, labels: Tensor, rows: Tensor, *, launch: bool = True) -> Tensor:
    """Parts of the mean loss, ``[T, P, 1]``."""
    if not use_triton(logits):
        return _flat(cross_entropy_rows_torch(logits, labels, rows)[..., None], 1)[:, None]
    with collected() as launches:
        partial = cross_entropy_parts_triton(logits, labels, rows)
    for each in launches if launch else ():
        each()
    return partial


def _register(name: str, parts: Callable[..., Any], schema: str) -> None:
    op = custom_op(f"weft::{name}_parts", mutates_args=(), schema=schema)(lambda *args: parts(*args))
    op.register_fake(lambda *args: parts(*args, launch=False))


_register("weight_grad", weight_grad_parts, "(Tensor grad, Tensor x) -> Tensor")
_register("column_sum", column_sum_parts, "(Tensor x) -> Tensor")
_register("bias_act_dropout_backward_bias", backward_bias_parts, BACKWARD_BIAS_SCHEMA)
_register("linear_backward", linear_backward_parts, f"{BACKWARD_ARGUMENTS} -> (Tensor, Tensor, Tensor)")
_register("cross_entropy_rows", cross_entropy_parts, "(Tensor logits, Tensor labels, Tensor rows) -> Tensor")


def add_parts(partial: Tensor, first: int, second: int, dtype: str) -> tuple[Tensor, ...]:
    """``partial [T, P, first + second]`` summed over P: ``[T, first]`` and ``[T, second]`` of the type ``dtype``."""
    kind = getattr(torch, dtype)
    if use_triton(partial) and partial.numel():
        return add_parts_triton(partial, (first, second), kind)
    total = partial[:, 0] if partial.shape[1] == 1 else partial.sum(1)
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in total.to(kind).split((first, second), 1))


ADD_PARTS = "(Tensor partial, int first, int second, str dtype) -> (Tensor, Tensor)"


@custom_op("weft::add_parts", ADD_PARTS)(add_parts).register_fake
def _add_parts_fake(partial, first, second, dtype):
    return tuple(partial.new_empty(partial.shape[0], size, dtype=getattr(torch, dtype)) for size in (first, second))
