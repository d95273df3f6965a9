"""Rules that trace a multi-stage operator as one graph node per stage.

A weight gradient ends in a split-K reduction that only the update reads; transposed weights are copied before they are
multiplied. As nodes of their own, such stages share launches with whatever else is ready. A rule adds the nodes that
make up one operator, whose arguments are nodes already, and says which node stands for which of its results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.ops.sparse import spmm  # noqa: F401  this and the next register the operators that are written down
from weft.weave import copies, two_phase_ops  # noqa: F401
from weft.weave.graph import Node

weft, aten = torch.ops.weft, torch.ops.aten


class Writer(Protocol):
    """The tracer that a rule adds nodes to."""

    def write(self, function: Any, args: tuple[Any, ...], like: Tensor | None = None) -> Node:
        """A new node; with ``like``, one that stands for a tensor in new memory."""

    def describe(self, node: Node, tensor: Tensor) -> None:
        """``node`` stands for ``tensor`` from here on."""


Rule = Callable[[Writer, tuple[Any, ...], Any], None]


def _sums(writer: Writer, partial: Node, outs: Sequence[Tensor], tasks: int) -> None:
    """The sum over ``partial [T, P, K]``, and the node of each of its one or two results."""
    sizes = [out.numel() // max(tasks, 1) for out in outs]
    dtype = str(outs[0].dtype).removeprefix("torch.")
    node = writer.write(weft.add_parts.default, (partial, *(*sizes, 0)[:2], dtype))
    for place, out in enumerate(outs):
        part = writer.write(operator.getitem, (node, place))
        writer.describe(part, out)
        writer.describe(writer.write(aten.view.default, (part, list(out.shape))), out)


def _results(writer: Writer, node: Node, outs: Sequence[Tensor]) -> None:
    for place, out in enumerate(outs):
        writer.describe(writer.write(operator.getitem, (node, place)), out)


def _weight_grad(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    partial = writer.write(weft.weight_grad_parts.default, args, out)
    _sums(writer, partial, [out], out.shape[:-2].numel())


def _column_sum(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    partial = writer.write(weft.column_sum_parts.default, args, out)
    _sums(writer, partial, [out], out.shape[:-1].numel())


def _cross_entropy(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    partial = writer.write(weft.cross_entropy_rows_parts.default, args, out)
    _sums(writer, partial, [out], out.numel())


def _backward_bias(writer: Writer, args: tuple[Any, ...], outs: tuple[Tensor, Tensor]) -> None:
    node = writer.write(weft.bias_act_dropout_backward_bias_parts.default, args)
    _results(writer, node, outs[:1])
    partial = writer.write(operator.getitem, (node, 1), outs[1])
    _sums(writer, partial, outs[1:], outs[1].shape[:-1].numel())


def _linear_backward(writer: Writer, args: tuple[Any, ...], outs: tuple[Tensor, ...]) -> None:
    node = writer.write(weft.linear_backward_parts.default, args)
    _results(writer, node, outs[:2])
    partial = writer.write(operator.getitem, (node, 2), outs[2])
    _sums(writer, partial, outs[2:], outs[3].shape[:-1].numel())


def _spmm(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    """The kernel needs contiguous rows; a transposed weight is copied first."""
    x, *rest = args
    if not x.meta["contiguous"]:
        x = writer.write(weft.copied.default, (x,), out)
    writer.describe(writer.write(weft.spmm.default, (x, *rest)), out)


def _over_contiguous_weight(function: Any) -> Rule:
    """The kernel needs a contiguous weight; the transposed one of a backward pass is copied first."""

    def rule(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
        x, weight, *rest = args
        if not weight.meta["contiguous"]:
            weight = writer.write(weft.copied.default, (weight,), out)
        writer.describe(writer.write(function, (x, weight, *rest)), out)

    return rule


def _clone(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    writer.describe(writer.write(weft.copied.default, args[:1]), out)


def _cat(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    writer.describe(writer.write(weft.side_by_side.default, args[:1]), out)


def _suits_clone(args: tuple[Any, ...], out: Tensor) -> bool:
    return out.is_contiguous() and out.dim() <= copies.DIMENSIONS


def _suits_cat(args: tuple[Any, ...], out: Tensor) -> bool:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    even = all(part.dim() == out.dim() and part.dtype == out.dtype for part in parts)
    return even and out.dim() <= 2 and dim % out.dim() == out.dim() - 1


RULES: dict[Any, tuple[Rule, Callable[[tuple[Any, ...], Any], bool]]] = {
    weft.weight_grad.default: (_weight_grad, lambda args, out: True),
    weft.column_sum.default: (_column_sum, lambda args, out: True),
    weft.cross_entropy_rows.default: (_cross_entropy, lambda args, out: True),
    weft.bias_act_dropout_backward_bias.default: (_backward_bias, lambda args, out: True),
    weft.linear_backward.default: (_linear_backward, lambda args, out: True),
    weft.spmm.default: (_spmm, lambda args, out: True),
    weft.product.default: (_over_contiguous_weight(weft.product.default), lambda args, out: True),
    weft.linear.default: (_over_contiguous_weight(weft.linear.default), lambda args, out: True),
    aten.clone.default: (_clone, _suits_clone),
    aten.cat.default: (_cat, _suits_cat),
}


def rule_for(function: Any, args: tuple[Any, ...], out: Any) -> Rule | None:
    """The rule that traces ``out = function(*args)`` (tensors, not nodes) as several nodes; None: as one."""
    rule, suits = RULES.get(function, (None, None))
    return rule if rule is not None and suits is not None and suits(args, out) else None
