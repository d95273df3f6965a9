"""Shapes of results where torch's own rule for tensors without data is slow to get ready.

Some of its rules are written in Python and load torch's compiler when they are first used: two seconds, before anything
is estimated. Here is the same for what is met in practice; what is out of the ordinary is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def light(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives for tensors without data, or NotImplemented."""
    if func is aten.where.self_out and _shape([*args, kwargs["out"]]) == tuple(kwargs["out"].shape):
        return kwargs["out"]
    rule = RULES.get(func)
    plain = all(value is None or value is False for value in kwargs.values())  # what was not said, or not wanted
    return rule(*args) if rule is not None and plain else NotImplemented


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """A result of the right size for dense tensors of one type that differ in ``dim`` alone."""
    first = tensors[0]
    place = dim % max(first.dim(), 1)
    if not all(_alike(first, tensor, place) for tensor in tensors):
        return NotImplemented
    shape = list(first.shape)
    shape[place] = sum(tensor.shape[place] for tensor in tensors)
    return first.new_empty(shape)


def _alike(first: Tensor, other: Tensor, place: int) -> bool:
    if not other.is_meta or other.dtype != first.dtype or other.dim() != first.dim():
        return False
    if not 0 < other.dim() < 4:  # four dimensions may be laid out in another order
        return False
    return all(a == b for at, (a, b) in enumerate(zip(first.shape, other.shape, strict=True)) if at != place)


def cumsum(tensor: Tensor, dim: int) -> Any:
    """A result of the same shape; whole numbers are added up in 64 bits."""
    if not tensor.is_meta or not tensor.is_contiguous():
        return NotImplemented
    return tensor.new_empty(tensor.shape, dtype=tensor.dtype if tensor.is_floating_point() else torch.int64)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """A result with one dimension more, for tensors of one shape and type."""
    first = tensors[0]
    if not _in_order(tensors) or any(one.shape != first.shape or one.dtype != first.dtype for one in tensors):
        return NotImplemented
    shape = list(first.shape)
    shape.insert(dim % (first.dim() + 1), len(tensors))
    return first.new_empty(shape)


def pointwise(*operands: Any) -> Any:
    """A result of the shape that the operands have together, and of the type that the first two have."""
    tensors = [one for one in operands if isinstance(one, Tensor)]
    return _made(tensors, torch.result_type(*operands[:2]) if len(operands) > 1 else tensors[0].dtype)


def real(*operands: Any) -> Any:
    """The same for what gives real numbers, where they are real to begin with."""
    given = [one.is_floating_point() for one in operands if isinstance(one, Tensor)]
    return pointwise(*operands) if all(given) else NotImplemented


def clamp(tensor: Tensor, low: Any = None, high: Any = None) -> Any:
    """A result like the argument, for bounds of its own kind."""
    fits = all(type(bound) is int or tensor.is_floating_point() for bound in (low, high) if bound is not None)
    return pointwise(tensor) if fits else NotImplemented


def addmm(bias: Tensor, one: Tensor, other: Tensor) -> Any:
    """``[M, K] x [K, N]`` and a row that is added to each of the result's."""
    types = {bias.dtype, one.dtype, other.dtype}
    fits = one.dim() == other.dim() == 2 and one.shape[1] == other.shape[0] and bias.shape == other.shape[1:]
    return one.new_empty(one.shape[0], other.shape[1]) if fits and one.is_meta and len(types) == 1 else NotImplemented


def test(*operands: Any) -> Any:
    """Yes or no for every element."""
    return _made([one for one in operands if isinstance(one, Tensor)], torch.bool)


def choose(condition: Tensor, one: Tensor, other: Tensor) -> Any:
    """One or the other, as the condition says."""
    return _made([condition, one, other], torch.result_type(one, other))


def in_place(target: Tensor, *others: Any) -> Any:
    """The target itself, where it is of real numbers and the others fit into it."""
    tensors = [target, *(one for one in others if isinstance(one, Tensor))]
    fits = target.is_meta and target.is_floating_point() and _shape(tensors) == tuple(target.shape)
    return target if fits else NotImplemented


def _made(tensors: Sequence[Tensor], dtype: torch.dtype) -> Any:
    """A result for operands that fit together; where they do not, torch finds the words."""
    shape = _shape(tensors)
    whole = [tensor for tensor in tensors if tuple(tensor.shape) == shape and 0 not in tensor.stride()]
    parts = [tensor for tensor in tensors if 0 not in tensor.stride()]
    ordered = _in_order(parts) and (bool(whole) or len(parts) == len(tensors))
    return tensors[0].new_empty(shape, dtype=dtype) if shape is not None and ordered else NotImplemented


def _in_order(tensors: Sequence[Tensor]) -> bool:
    """Whether the result lies in order, too: no operand is turned around, though it may be a part of something."""
    return all(tensor.is_meta and _descends(tensor) for tensor in tensors)


def _descends(tensor: Tensor) -> bool:
    steps = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return steps == sorted(steps, reverse=True)


def _shape(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The shape of all together; None where there is none."""
    depth = max(tensor.dim() for tensor in tensors)
    rows = [(1,) * (depth - tensor.dim()) + tuple(tensor.shape) for tensor in tensors]
    places = [{size for size in sizes if size != 1} for sizes in zip(*rows, strict=True)]
    return None if any(len(sizes) > 1 for sizes in places) else tuple(sizes.pop() if sizes else 1 for sizes in places)


aten = torch.ops.aten
RULES: dict[Any, Callable[..., Any]] = {
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.cumsum.default: cumsum,
    aten.where.self: choose,
    aten.clamp.default: clamp,
    aten.addmm.default: addmm,
    **{
        getattr(aten, name).default: real
        for name in ["reciprocal", "rsqrt", "sqrt", "exp", "log", "neg", "abs", "relu", "sigmoid", "tanh", "erf"]
    },
    **{getattr(aten, name).default: pointwise for name in ["zeros_like", "ones_like", "empty_like"]},
    **{getattr(aten, name).Tensor: pointwise for name in ["add", "sub", "mul"]},
    aten.div.Tensor: real,
    **{getattr(aten, name).Tensor: in_place for name in ["add_", "sub_", "mul_", "div_"]},
    **{getattr(aten, name).default: test for name in ["isinf", "isnan"]},
    **{getattr(aten, name).Tensor: test for name in ["eq", "ne", "lt", "le", "gt", "ge"]},
    **{getattr(aten, name).Scalar: test for name in ["eq", "ne", "lt", "le", "gt", "ge"]},
}
