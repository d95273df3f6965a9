"""Gradients of operators that share a merged launch: their backward passes share launches too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.ops.csr.packed import unpack_csr
from weft.weave.together import OpCall, together

Gradients = dict[int, Tensor]  # position of an argument to its gradient
Finish = Callable[[list[tuple[Tensor, ...]]], Gradients]  # from the results of the calls to gradients


def spmm_backward(
    call: OpCall, outputs: tuple[Tensor, ...], grad: Tensor, wanted: set[int]
) -> tuple[list[OpCall], Finish]:
    """The calls that the gradient of a sum needs: the transpose for x, dot products for the weights."""
    x, weight, row_scale, col_scale, csr, back, _ = call.arguments
    calls = []
    if 0 in wanted:
        weight_back = None if weight is None else weight.index_select(-1, unpack_csr(back).perm)
        calls.append(OpCall("spmm", (grad, weight_back, col_scale, row_scale, back, csr, weight)))
    if 1 in wanted:
        left = grad if row_scale is None else grad * row_scale[:, None].to(grad.dtype)
        right = x if col_scale is None else x * col_scale[:, None].to(x.dtype)
        calls.append(OpCall("sddmm", (left, right, 1, csr, back)))

    def finish(results: list[tuple[Tensor, ...]]) -> Gradients:
        found = dict(zip(sorted(wanted), (result[0] for result in results), strict=True))
        if 1 in found:
            found[1] = found[1].squeeze(-1).sum_to_size(weight.shape).to(weight.dtype)
        return found

    return calls, finish


def max_backward(
    call: OpCall, outputs: tuple[Tensor, ...], grad: Tensor, wanted: set[int]
) -> tuple[list[OpCall], Finish]:
    """The gradient of a maximum goes to the winning edges; its weights get none, as in ``spmm_max``."""
    _, weight, csr, back = call.arguments
    calls = [OpCall("spmm_max_backward", (grad.contiguous(), outputs[1], weight, csr, back))] if 0 in wanted else []
    return calls, lambda results: {0: results[0][0]} if results else {}


def sddmm_backward(
    call: OpCall, outputs: tuple[Tensor, ...], grad: Tensor, wanted: set[int]
) -> tuple[list[OpCall], Finish]:
    """d a = weighted sum of b over the in-edges, d b = weighted sum of a over the out-edges, head by head."""
    a, b, heads, csr, back = call.arguments

    def per_head(x: Tensor, weight: Tensor, there: list[Tensor], other: list[Tensor]) -> OpCall:
        x_heads = x.unflatten(-1, (heads, -1)).movedim(-2, 0)
        return OpCall("spmm", (x_heads, weight.movedim(-1, 0), None, None, there, other, None))

    calls = []
    if 0 in wanted:
        calls.append(per_head(b, grad, csr, back))
    if 1 in wanted:
        calls.append(per_head(a, grad.index_select(-2, unpack_csr(back).perm), back, csr))
    return calls, lambda results: {
        place: result[0].movedim(0, -2).flatten(-2) for place, result in zip(sorted(wanted), results, strict=True)
    }


def softmax_backward(
    call: OpCall, outputs: tuple[Tensor, ...], grad: Tensor, wanted: set[int]
) -> tuple[list[OpCall], Finish]:
    """``out * (grad - sum over the row of out * grad)``."""
    calls = [OpCall("edge_softmax_backward", (grad, outputs[0], call.arguments[1]))]
    return calls, lambda results: {0: results[0][0]}


BACKWARD = {
    "spmm": (spmm_backward, (0, 1)),
    "spmm_max": (max_backward, (0,)),
    "sddmm": (sddmm_backward, (0, 1)),
    "edge_softmax": (softmax_backward, (0,)),
}


class _Together(torch.autograd.Function):
    """``together`` of calls whose differentiable tensors are given apart, call by call."""

    @staticmethod
    def forward(ctx: Any, calls: Sequence[OpCall], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        done = together(calls)
        flat = [value for outputs in done for value in outputs]
        ctx.calls, ctx.counts = calls, [len(outputs) for outputs in done]
        ctx.save_for_backward(*flat)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(value for value in flat if not value.is_floating_point()))
        return tuple(flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved, given, wants = iter(ctx.saved_tensors), iter(grads), iter(ctx.needs_input_grad[1:])
        jobs: list[tuple[list[OpCall], Finish]] = []
        for call, count in zip(ctx.calls, ctx.counts, strict=True):
            outputs = tuple(next(saved) for _ in range(count))
            grad, *_ = [next(given) for _ in range(count)]
            make, places = BACKWARD[call.name]
            wanted = {place for place in places if next(wants)}
            jobs.append(make(call, outputs, grad, wanted) if grad is not None and wanted else ([], lambda _: {}))
        results = iter(together([call for calls, _ in jobs for call in calls]))
        found = [finish([next(results) for _ in calls]) for calls, finish in jobs]
        flat = [
            gradients.get(place)
            for call, gradients in zip(ctx.calls, found, strict=True)
            for place in BACKWARD[call.name][1]
        ]
        return None, *flat


def differentiable(calls: Sequence[OpCall]) -> list[tuple[Tensor, ...]]:
    """:func:`together`, with gradients to the tensors that each operator is differentiable in."""
    tensors = [call.arguments[place] for call in calls for place in BACKWARD[call.name][1]]
    if not (torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in tensors)):
        return together(calls)
    counts = [2 if call.name == "spmm_max" else 1 for call in calls]
    flat = iter(_Together.apply(calls, *tensors))
    return [tuple(next(flat) for _ in range(count)) for count in counts]
