"""spmm_max: the largest neighbour, feature by feature.

    out[t, i, f] = max over e = (j -> i) of weight[e] * x[t, j, f];  0 for rows without edges

The winning edge is kept (the first one on a tie), so the backward pass is a gather over the transpose and
needs no atomics. Shapes: T tasks, N rows, M columns, E edges, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops import cpu
from weft.ops.csr.adjacency import Adjacency, supplied_by_adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr, pack_csr_backward, scatter_extreme, unpack_csr
from weft.ops.launch.backend import accumulate_dtype, custom_op, use_triton
from weft.ops.sparse.spmm_max_triton import spmm_max_backward_triton, spmm_max_triton


def spmm_max_torch(x: Tensor, weight: Tensor | None, csr: PackedCSR) -> tuple[Tensor, Tensor]:
    """Reference: ``(out [..., N, F], winner [..., N, F])``; winner is an edge, or -1."""
    rows = csr.rows()
    messages = x.index_select(-2, csr.indices.long())
    if weight is not None:
        messages = messages * weight[:, None].to(x.dtype)
    shape = (*x.shape[:-2], csr.num_rows, x.shape[-1])
    top = scatter_extreme(messages.new_full(shape, -torch.inf), rows, messages, "amax")
    edge = torch.arange(csr.num_edges, device=x.device)[:, None].expand(messages.shape[-2:])
    none = csr.num_edges
    hit = (messages == top.index_select(-2, rows)) | messages.isnan()  # the maximum of a row with NaN is NaN
    candidate = torch.where(hit, edge, none)
    winner = torch.full(shape, none, dtype=torch.int64, device=x.device)
    winner = scatter_extreme(winner, rows, candidate, "amin")
    winner = torch.where(winner == none, -1, winner)
    return torch.where(winner < 0, 0.0, top).to(x.dtype), winner.to(csr.indptr.dtype)


def spmm_max_backward_torch(
    grad: Tensor, winner: Tensor, weight: Tensor | None, csr: PackedCSR, num_cols: int
) -> Tensor:
    """Reference: send every gradient to the source of its winning edge."""
    edge = winner.long().clamp(min=0)
    value = torch.where(winner < 0, 0.0, grad.to(accumulate_dtype(grad.dtype)))
    if csr.num_edges == 0:
        return grad.new_zeros(*grad.shape[:-2], num_cols, grad.shape[-1])
    if weight is not None:
        value = value * weight[edge]
    out = value.new_zeros(*grad.shape[:-2], num_cols, grad.shape[-1])
    return out.scatter_add(-2, csr.indices.long()[edge], value).to(grad.dtype)


@custom_op(
    "weft::spmm_max",
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor[] csr, Tensor[] back) -> (Tensor, Tensor)",
)
def _spmm_max_op(x, weight, csr, back):
    opened = unpack_csr(csr)
    if use_triton(x):
        return spmm_max_triton(x, weight, opened)
    if cpu.serves(x, weight):
        return cpu.spmm_max(x, weight, opened)
    return spmm_max_torch(x, weight, opened)


@custom_op(
    "weft::spmm_max_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor winner, Tensor? weight, Tensor[] csr, Tensor[] back) -> Tensor",
)
def _spmm_max_backward_op(grad, winner, weight, csr, back):
    opened, opened_back = unpack_csr(csr), unpack_csr(back)
    if use_triton(grad):
        return spmm_max_backward_triton(grad, winner, weight, opened_back)
    if cpu.serves(grad, weight):
        return cpu.spmm_max_backward(grad, winner, weight, opened, opened_back.num_rows)
    return spmm_max_backward_torch(grad, winner, weight, opened, opened_back.num_rows)


@_spmm_max_op.register_fake
def _fake(x, weight, csr, back):
    out = x.new_empty(*x.shape[:-2], csr[0].shape[0] - 1, x.shape[-1])
    return out, torch.empty_like(out, dtype=csr[0].dtype)


@_spmm_max_backward_op.register_fake
def _backward_fake(grad, winner, weight, csr, back):
    return grad.new_empty(*grad.shape[:-2], back[0].shape[0] - 1, grad.shape[-1])


def _setup(ctx, inputs, output):
    _, weight, ctx.csr, ctx.back = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else autograd materialises zeros for outputs without gradients


def _backward(ctx, grad, _):
    winner, weight = ctx.saved_tensors
    grad_x = None if grad is None else _spmm_max_backward_op(grad.contiguous(), winner, weight, ctx.csr, ctx.back)
    return grad_x, None, [None] * len(ctx.csr), [None] * len(ctx.back)


_spmm_max_op.register_autograd(_backward, setup_context=_setup)


@_spmm_max_op.register_vmap
def _vmap(info, in_dims, x, weight, csr, back):
    return _spmm_max_op(x.movedim(in_dims[0], 0), weight, csr, back), (0, 0)


@_spmm_max_backward_op.register_vmap
def _backward_vmap(info, in_dims, grad, winner, weight, csr, back):
    grad = grad.movedim(in_dims[0], 0) if in_dims[0] is not None else grad.expand(info.batch_size, *grad.shape)
    winner = winner.movedim(in_dims[1], 0)
    return _spmm_max_backward_op(grad, winner, weight, csr, back), 0


@supplied_by_adjacency
def spmm_max(adj: Adjacency, x: Tensor) -> Tensor:
    """Maximum over the in-edges of ``adj.weight * x [..., M, F]``: ``[..., N, F]``, differentiable in x."""
    return _spmm_max_op(x, adj.weight, pack_csr(adj), pack_csr_backward(adj))[0]
