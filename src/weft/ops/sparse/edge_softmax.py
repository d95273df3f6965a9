"""edge_softmax: the softmax of per-edge scores over the in-edges of every destination.

    out[t, e, h] = exp(s[t, e, h] - max) / sum        max and sum over the edges into the same row

Shapes: T tasks, N rows, E edges, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops import cpu
from weft.ops.csr.adjacency import Adjacency, supplied_by_adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr, segment_softmax, segment_sum, unpack_csr
from weft.ops.launch.backend import accumulate_dtype, custom_op, use_triton
from weft.ops.sparse.edge_softmax_triton import edge_softmax_backward_triton, edge_softmax_triton


def edge_softmax_torch(scores: Tensor, csr: PackedCSR) -> Tensor:
    """Reference."""
    return segment_softmax(scores.to(accumulate_dtype(scores.dtype)), csr).to(scores.dtype)


def edge_softmax_backward_torch(grad: Tensor, out: Tensor, csr: PackedCSR) -> Tensor:
    """Reference: ``out * (grad - sum over the row of out * grad)``."""
    acc = accumulate_dtype(out.dtype)
    product = out.to(acc) * grad.to(acc)
    return (product - out.to(acc) * segment_sum(product, csr).index_select(-2, csr.rows())).to(out.dtype)


@custom_op("weft::edge_softmax", mutates_args=(), schema="(Tensor scores, Tensor[] csr) -> Tensor")
def _edge_softmax_op(scores, csr):
    opened = unpack_csr(csr)
    if use_triton(scores):
        return edge_softmax_triton(scores, opened)
    if cpu.serves(scores):
        return cpu.edge_softmax(scores, opened)
    return edge_softmax_torch(scores, opened)


@custom_op(
    "weft::edge_softmax_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor out, Tensor[] csr) -> Tensor",
)
def _edge_softmax_backward_op(grad, out, csr):
    opened = unpack_csr(csr)
    if use_triton(out):
        return edge_softmax_backward_triton(grad, out, opened)
    if cpu.serves(grad, out):
        return cpu.edge_softmax_backward(grad, out, opened)
    return edge_softmax_backward_torch(grad, out, opened)


@_edge_softmax_op.register_fake
def _edge_softmax_fake(scores, csr):
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


@_edge_softmax_backward_op.register_fake
def _edge_softmax_backward_fake(grad, out, csr):
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    _, ctx.csr = inputs
    ctx.save_for_backward(output)


def _backward(ctx, grad):
    (out,) = ctx.saved_tensors
    return _edge_softmax_backward_op(grad, out, ctx.csr), [None] * len(ctx.csr)


_edge_softmax_op.register_autograd(_backward, setup_context=_setup)


@_edge_softmax_op.register_vmap
def _vmap(info, in_dims, scores, csr):
    return _edge_softmax_op(scores.movedim(in_dims[0], 0), csr), 0


@_edge_softmax_backward_op.register_vmap
def _backward_vmap(info, in_dims, grad, out, csr):
    grad = grad.movedim(in_dims[0], 0) if in_dims[0] is not None else grad.expand(info.batch_size, *grad.shape)
    out = out.movedim(in_dims[1], 0) if in_dims[1] is not None else out.expand(info.batch_size, *out.shape)
    return _edge_softmax_backward_op(grad, out, csr), 0


@supplied_by_adjacency
def edge_softmax(adj: Adjacency, scores: Tensor) -> Tensor:
    """Softmax of ``scores [..., E, heads]`` (CSR order) over the in-edges of every row."""
    if scores.dim() < 2 or scores.shape[-2] != adj.num_edges:
        raise InputError(
            f"edge_softmax: scores of shape {tuple(scores.shape)} must be [..., {adj.num_edges} edges, heads]"
        )
    return _edge_softmax_op(scores, pack_csr(adj, rows=True))
