"""spmm: one pass over the edges that sums or maximises neighbours' rows.

    out[t, i, f] = row_scale[i] * sum over e = (j -> i) of weight[t, e] * col_scale[j] * x[t, j, f]

Shapes: T tasks, N rows, M columns, E edges, F features. ``x_TMF`` may have any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops import cpu
from weft.ops.csr.adjacency import Adjacency, supplied_by_adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr, pack_csr_backward, unpack_csr
from weft.ops.launch.backend import accumulate_dtype, custom_op, use_triton
from weft.ops.sparse.sddmm import edge_dot
from weft.ops.sparse.spmm_triton import spmm_triton


def spmm_torch(
    x: Tensor, weight: Tensor | None, row_scale: Tensor | None, col_scale: Tensor | None, csr: PackedCSR
) -> Tensor:
    """Reference: gather every edge's row, scale it, add it to its destination."""
    messages = _messages(x, weight, col_scale, csr)
    out = messages.new_zeros(*x.shape[:-2], csr.num_rows, x.shape[-1])
    out = out.index_add(-2, csr.rows(), messages)
    return (out if row_scale is None else out * row_scale[:, None]).to(x.dtype)


def _messages(x: Tensor, weight: Tensor | None, col_scale: Tensor | None, csr: PackedCSR) -> Tensor:
    """``[..., E, F]`` in the accumulation type."""
    cols = csr.indices.long()
    messages = x.index_select(-2, cols).to(accumulate_dtype(x.dtype))
    if col_scale is not None:
        messages = messages * col_scale[cols][:, None]
    return messages if weight is None else messages * weight[..., None]


@custom_op(
    "weft::spmm",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor? weight, Tensor? row_scale, Tensor? col_scale, Tensor[] csr, Tensor[] back,"
        " Tensor? weight_back) -> Tensor"
    ),
)
def _spmm_op(x, weight, row_scale, col_scale, csr, back, weight_back):
    opened = unpack_csr(csr)
    if use_triton(x):
        return spmm_triton(x, weight, row_scale, col_scale, opened)
    if cpu.serves(x, weight):
        return cpu.spmm(x, weight, row_scale, col_scale, opened)
    return spmm_torch(x, weight, row_scale, col_scale, opened)


@_spmm_op.register_fake
def _spmm_fake(x, weight, row_scale, col_scale, csr, back, weight_back):
    return x.new_empty(*x.shape[:-2], csr[0].shape[0] - 1, x.shape[-1])


def _spmm_setup(ctx, inputs, output):
    x, weight, row_scale, col_scale, csr, back, weight_back = inputs
    ctx.csr, ctx.back, ctx.wants_weight = csr, back, ctx.needs_input_grad[1]
    ctx.save_for_backward(x if ctx.wants_weight else None, weight, row_scale, col_scale, weight_back)


def _spmm_backward(ctx, grad):
    x, weight, row_scale, col_scale, weight_back = ctx.saved_tensors
    csr, back = ctx.csr, ctx.back
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        if weight is not None and weight_back is None:
            weight_back = weight.index_select(-1, unpack_csr(back).perm)
        grad_x = _spmm_op(grad, weight_back, col_scale, row_scale, back, csr, weight)
    if ctx.wants_weight:
        grad_weight = _grad_weight(grad, x, weight, row_scale, col_scale, csr, back)
    return grad_x, grad_weight, None, None, [None] * len(csr), [None] * len(back), None


def _grad_weight(grad, x, weight, row_scale, col_scale, csr, back):
    """d weight[e] = <row_scale[i] grad[i], col_scale[j] x[j]>, summed over tasks that share the weight."""
    left = grad if row_scale is None else grad * row_scale[:, None].to(grad.dtype)
    right = x if col_scale is None else x * col_scale[:, None].to(x.dtype)
    dots = edge_dot(left, right, 1, csr, back).squeeze(-1)
    return dots.sum_to_size(weight.shape).to(weight.dtype)


_spmm_op.register_autograd(_spmm_backward, setup_context=_spmm_setup)


@_spmm_op.register_vmap
def _spmm_vmap(info, in_dims, x, weight, row_scale, col_scale, csr, back, weight_back):
    """T tasks over one graph are one call on ``[T, ..., M, F]``."""
    x_dim, weight_dim, weight_back_dim = in_dims[0], in_dims[1], in_dims[6]
    x = x.movedim(x_dim, 0) if x_dim is not None else x.expand(info.batch_size, *x.shape)
    if weight_dim is not None:
        weight = _under_tasks(weight.movedim(weight_dim, 0), x)
    if weight_back_dim is not None:
        weight_back = _under_tasks(weight_back.movedim(weight_back_dim, 0), x)
    return _spmm_op(x, weight, row_scale, col_scale, csr, back, weight_back), 0


def _under_tasks(weight: Tensor, x: Tensor) -> Tensor:
    """``weight [T, E]`` as ``[T, 1, ..., E]``: inner tasks of ``x [T, ..., M, F]`` share it."""
    shared = (1,) * (x.dim() - 1 - weight.dim())
    return weight.reshape(weight.shape[0], *shared, *weight.shape[1:])


@supplied_by_adjacency
def spmm(adj: Adjacency, x: Tensor, weight: Tensor | None = None, reduce: str = "sum") -> Tensor:
    """Aggregate the rows of ``x [..., M, F]`` over the in-edges of every row: ``[..., N, F]``.

    ``weight [E]`` (or ``[..., E]``, one set per task) multiplies the edges; it defaults to ``adj.weight`` and
    is differentiable. ``reduce`` is ``"sum"``, ``"mean"`` (the sum divided by the degree) or ``"max"``.
    Rows without edges give zeros.
    """
    if x.shape[-2] != adj.num_cols:
        raise InputError(f"spmm: x has {x.shape[-2]} rows, the adjacency has {adj.num_cols} columns; they must agree")
    if reduce == "max":
        from weft.ops.sparse.spmm_max import spmm_max

        return spmm_max(adj, x)
    if reduce == "mean":
        adj = adj.mean()
    elif reduce != "sum":
        raise InputError(f"spmm: reduce={reduce!r} must be 'sum', 'mean' or 'max'")
    # Fixed weights are transposed once; learned ones need the transpose's order of edges.
    back = pack_csr_backward(adj, perm=weight is not None)
    weight_back = adj.transposed().weight if weight is None and back else None
    weight = adj.weight if weight is None else weight
    needs_rows = torch.is_grad_enabled() and weight is not None and weight.requires_grad
    csr = pack_csr(adj, rows=needs_rows)
    return _spmm_op(x, weight, adj.row_scale, adj.col_scale, csr, back, weight_back)
