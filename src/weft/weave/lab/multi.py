"""multi_spmm: one launch that aggregates over one graph for several sources at once.

    out_s[t, i, f] = row_scale_s[i] * sum over e = (j -> i) of weight_s[t, e] * col_scale_s[j] * x_s[t, j, f]

or the maximum over e of ``weight_s[e] * x_s[t, j, f]``. Every source s has its own number of tasks, width, factors and
aggregator; they share the structure. ``joined_spmm`` adds sources of the other direction, along the transpose, to the
same launch (a forward pass of some tasks beside the backward pass of others); ``pull_push_spmm`` computes those
without a transpose by sending rows along the edges of the original structure.

Shapes: T tasks (any leading dimensions), N rows, M columns, E edges, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.core.errors import InputError
from weft.ops.csr.adjacency import Adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr, pack_csr_backward, unpack_csr
from weft.ops.launch.backend import accumulate_dtype, custom_op, use_triton
from weft.ops.sparse.edge_softmax import edge_softmax_torch
from weft.ops.sparse.sddmm import sddmm_torch
from weft.ops.sparse.spmm import spmm_torch
from weft.ops.sparse.spmm_max import spmm_max_torch
from weft.weave.merged_launch import OpCall, together
from weft.weave.rows_triton import push_triton

# ---- Gradients of operators that share a merged launch: their backward passes share launches too.

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


REDUCE = ("sum", "mean", "max")


@dataclass(frozen=True)
class Source:
    """What one source aggregates: ``x [..., M, F]`` and its own factors on the shared structure.

    ``weight [E]`` (or ``[..., E]``, one set per task), ``row_scale [N]``, ``col_scale [M]``; ``reduce`` is ``"sum"``,
    ``"mean"`` (the sum divided by the degree, times ``row_scale``) or ``"max"`` (which takes ``weight`` alone).
    """

    x: Tensor
    reduce: str = "sum"
    weight: Tensor | None = None
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None

    @classmethod
    def over(cls, adj: Adjacency, x: Tensor, reduce: str = "sum") -> Source:
        """``x`` with the factors of ``adj``, for example of ``adj.gcn()``."""
        return cls(x, reduce, adj.weight, adj.row_scale, adj.col_scale)


def multi_spmm_torch(csr: PackedCSR, sources: Sequence[Source]) -> list[Tensor]:
    """Reference: one source after another."""
    return [_reference(csr, source) for source in sources]


def _reference(csr: PackedCSR, source: Source) -> Tensor:
    if source.reduce == "max":
        return spmm_max_torch(source.x, source.weight, csr)[0]
    row_scale = source.row_scale
    if source.reduce == "mean":
        mean = csr.indptr.diff().clamp(min=1).to(torch.float32).reciprocal()
        row_scale = mean if row_scale is None else mean * row_scale
    return spmm_torch(source.x, source.weight, row_scale, source.col_scale, csr)


def pull_push_spmm_torch(
    csr: PackedCSR, pulls: Sequence[Source], pushes: Sequence[Source], num_cols: int
) -> list[Tensor]:
    """Reference of both directions: pulls ``[..., N, F]``, then pushes ``[..., M, F]``."""
    sent = [push_torch(s.x, s.weight, s.row_scale, s.col_scale, csr, num_cols).to(s.x.dtype) for s in pushes]
    return [*multi_spmm_torch(csr, pulls), *sent]


def push_torch(x, weight, row_scale, col_scale, csr: PackedCSR, num_cols: int) -> Tensor:
    """Reference: every row of ``x [..., N, F]`` added to the columns its edges come from, ``[..., M, F]``."""
    rows, cols = csr.rows(), csr.indices.long()
    messages = x.index_select(-2, rows).to(accumulate_dtype(x.dtype))
    if row_scale is not None:
        messages = messages * row_scale[rows][:, None]
    if weight is not None:
        messages = messages * weight[..., None]
    if col_scale is not None:
        messages = messages * col_scale[cols][:, None]
    return messages.new_zeros(*x.shape[:-2], num_cols, x.shape[-1]).index_add(-2, cols, messages)


@custom_op(
    "weft::spmm_push",
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? row_scale, Tensor? col_scale, Tensor[] csr, int num_cols) -> Tensor",
)
def _push_op(x, weight, row_scale, col_scale, csr, num_cols):
    if use_triton(x):
        return push_triton(x, weight, row_scale, col_scale, unpack_csr(csr), num_cols)
    return push_torch(x, weight, row_scale, col_scale, unpack_csr(csr), num_cols).contiguous()


@_push_op.register_fake
def _push_fake(x, weight, row_scale, col_scale, csr, num_cols):
    return x.new_empty(*x.shape[:-2], num_cols, x.shape[-1], dtype=accumulate_dtype(x.dtype))


# ---- from sources to calls --------------------------------------------------------------------------------


def _call(adj: Adjacency, source: Source) -> OpCall:
    """The operator that serves ``source`` alone."""
    _check(adj, source)
    back = pack_csr_backward(adj)
    csr = pack_csr(adj, rows=_wants_gradient(source.weight))
    if source.reduce == "max":
        return OpCall("spmm_max", (source.x, source.weight, csr, back))
    row_scale = source.row_scale
    if source.reduce == "mean":
        mean = adj.inverse_degrees()
        row_scale = mean if row_scale is None else mean * row_scale
    return OpCall("spmm", (source.x, source.weight, row_scale, source.col_scale, csr, back, None))


def _wants_gradient(value: Tensor | None) -> bool:
    return torch.is_grad_enabled() and value is not None and value.requires_grad


def _check(adj: Adjacency, source: Source, transposed: bool = False) -> None:
    """Raise an InputError if ``source`` does not fit ``adj``."""
    rows = adj.num_rows if transposed else adj.num_cols
    if source.reduce not in REDUCE:
        raise InputError(f"multi_spmm: reduce={source.reduce!r} must be one of {', '.join(map(repr, REDUCE))}")
    if source.x.dim() < 2 or source.x.shape[-2] != rows:
        raise InputError(
            f"multi_spmm: a source of shape {tuple(source.x.shape)} must be [..., {rows}, F] over {adj.num_rows} x"
            f" {adj.num_cols}{' transposed' if transposed else ''}"
        )
    if source.reduce == "max" and (source.row_scale is not None or source.col_scale is not None):
        raise InputError("multi_spmm: reduce='max' takes no row_scale or col_scale; scale its input or its result")


def _back_call(adj: Adjacency, source: Source) -> OpCall:
    """The sum along the transpose of ``adj``; the factors of ``source`` are those of ``adj``, not of its transpose."""
    _check(adj, source, transposed=True)
    if source.reduce != "sum":
        raise InputError(f"multi_spmm: a push sums; reduce={source.reduce!r} must be 'sum'")
    back, csr = pack_csr(adj.transposed(), perm=True), pack_csr(adj)
    weight = source.weight
    weight_back = None if weight is None else weight.index_select(-1, unpack_csr(back).perm)
    return OpCall("spmm", (source.x, weight_back, source.col_scale, source.row_scale, back, csr, weight))


def multi_spmm(adj: Adjacency, sources: Sequence[Source]) -> list[Tensor]:
    """Aggregate every source over the structure of ``adj``: ``[..., N, F_s]`` each, in one launch.

    Factors are the sources' own; those of ``adj`` are ignored. Differentiable in ``x`` and ``weight``; the gradients
    of all sources share launches as well. Each result equals that of :func:`weft.ops.sparse.spmm`: bit for bit on a
    CPU, and on a GPU among sources of one width; otherwise to rounding (see :mod:`weft.weave.merged_launch`).
    """
    return [outputs[0] for outputs in differentiable([_call(adj, source) for source in sources])]


def joined_spmm(adj: Adjacency, pulls: Sequence[Source], pushes: Sequence[Source]) -> tuple[list[Tensor], list[Tensor]]:
    """Sums over ``adj`` for ``pulls`` and over its transpose for ``pushes``, in one launch.

    Pushes are ``x [..., N, F]`` to ``[..., M, F]`` with factors given for ``adj``, as a backward pass has them. Both
    directions have their own work items in the grid, there are no atomics, and the result is deterministic.
    """
    with torch.no_grad():
        calls = [*(_call(adj, source) for source in pulls), *(_back_call(adj, source) for source in pushes)]
        out = [outputs[0] for outputs in together(calls)]
    return out[: len(pulls)], out[len(pulls) :]


def pull_push_spmm(
    adj: Adjacency, pulls: Sequence[Source], pushes: Sequence[Source]
) -> tuple[list[Tensor], list[Tensor]]:
    """The same as :func:`joined_spmm` over the structure of ``adj`` alone: pushes are sent along its edges.

    Needs no transpose, and edges are read once for both. Pushed rows are added atomically, in another order on every
    run, so the last bits of ``pushes`` differ from run to run. Use it only if it was measured to be faster.
    """
    with torch.no_grad():
        csr = pack_csr(adj)
        for source in pushes:
            _check(adj, source, transposed=True)
        sent = [OpCall("spmm_push", (s.x, s.weight, s.row_scale, s.col_scale, csr, adj.num_cols)) for s in pushes]
        out = [outputs[0] for outputs in together([*(_call(adj, source) for source in pulls), *sent])]
    given = [value.to(source.x.dtype) for value, source in zip(out[len(pulls) :], pushes, strict=True)]
    return out[: len(pulls)], given


# ---- multi_sddmm: dot products along the edges of one graph for several sources at once, in one launch.
#
#     out_s[t, e, h] = sum over d of a_s[t, i, h, d] * b_s[t, j, h, d]      for e = (j -> i)
#
# Shapes: T tasks (any leading dimensions), N rows, M columns, E edges, H heads, D features of a head.


@dataclass(frozen=True)
class Ends:
    """What one source multiplies: ``a [..., N, heads*D]`` at destinations, ``b [..., M, heads*D]`` at sources."""

    a: Tensor
    b: Tensor
    heads: int = 1


def multi_sddmm_torch(csr: PackedCSR, sources: Sequence[Ends]) -> list[Tensor]:
    """Reference: one source after another."""
    return [sddmm_torch(source.a, source.b, source.heads, csr) for source in sources]


def multi_sddmm(adj: Adjacency, sources: Sequence[Ends]) -> list[Tensor]:
    """Dot products ``[..., E, heads_s]`` of every source, in CSR order; differentiable in both ends."""
    for source in sources:
        _check_sddmm(adj, source)
    csr, back = pack_csr(adj, rows=True), pack_csr_backward(adj, rows=True)
    calls = [OpCall("sddmm", (source.a, source.b, source.heads, csr, back)) for source in sources]
    return [outputs[0] for outputs in differentiable(calls)]


def _check_sddmm(adj: Adjacency, source: Ends) -> None:
    a, b, heads = source.a, source.b, source.heads
    if a.shape[-1] != b.shape[-1] or a.shape[-1] % heads:
        raise InputError(
            f"multi_sddmm: widths {a.shape[-1]} and {b.shape[-1]} must be equal and divisible by heads={heads}"
        )
    if a.shape[-2] != adj.num_rows or b.shape[-2] != adj.num_cols:
        raise InputError(
            f"multi_sddmm: a has {a.shape[-2]} rows and b {b.shape[-2]}; the adjacency is"
            f" {adj.num_rows} x {adj.num_cols}"
        )


# ---- multi_edge_softmax: the softmax over the in-edges of every row for several sources at once, in one launch.
#
#     out_s[t, e, h] = exp(scores_s[t, e, h] - max) / sum        max and sum over the edges into the same row
#
# Shapes: T tasks (any leading dimensions), N rows, E edges, H heads.


def multi_edge_softmax_torch(csr: PackedCSR, sources: Sequence[Tensor]) -> list[Tensor]:
    """Reference: one source after another."""
    return [edge_softmax_torch(scores, csr) for scores in sources]


def multi_edge_softmax(adj: Adjacency, sources: Sequence[Tensor]) -> list[Tensor]:
    """Softmax of every ``scores [..., E, heads_s]`` (CSR order) over the in-edges of every row; differentiable."""
    for scores in sources:
        if scores.dim() < 2 or scores.shape[-2] != adj.num_edges:
            raise InputError(
                f"multi_edge_softmax: scores of shape {tuple(scores.shape)} must be [..., {adj.num_edges} edges, heads]"
            )
    csr = pack_csr(adj, rows=True)
    return [outputs[0] for outputs in differentiable([OpCall("edge_softmax", (scores, csr)) for scores in sources])]
