"""multi_spmm: one launch that aggregates over one graph for several sources at once.

    out_s[t, i, f] = row_scale_s[i] * sum over e = (j -> i) of weight_s[t, e] * col_scale_s[j] * x_s[t, j, f]

or the maximum over e of ``weight_s[e] * x_s[t, j, f]``. Every source s has its own number of tasks, width, factors and
aggregator; they share the structure. ``joined_spmm`` adds sources of the other direction, along the transpose, to the
same launch (a forward pass of some tasks beside the backward pass of others); ``pull_push_spmm`` computes those
without a transpose by sending rows along the edges of the original structure.

Shapes: T tasks (any leading dimensions), N rows, M columns, E edges, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.csr.adjacency import Adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr, pack_csr_backward, unpack_csr
from weft.ops.launch.backend import accumulate_dtype, use_triton
from weft.ops.launch.custom_op import custom_op
from weft.ops.sparse.spmm import spmm_torch
from weft.ops.sparse.spmm_max import spmm_max_torch
from weft.weave.lab.autograd import differentiable
from weft.weave.lab.push_triton import push_triton
from weft.weave.together import OpCall, together

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
    CPU, and on a GPU among sources of one width; otherwise to rounding (see :mod:`weft.weave.together`).
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
