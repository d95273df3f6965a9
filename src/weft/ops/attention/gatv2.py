"""graph_attention_v2: GATv2's attention in one pass, without arrays of size E x F in memory.

    s[e, h]      = <att[h], leaky_relu(x_src[j, h] + x_dst[i, h])>          for e = (j -> i)
    alpha[e, h]  = softmax of s over the in-edges of i
    out[i, h, :] = sum over e of keep[e, h] / (1 - rate) * alpha[e, h] * x_src[j, h, :]

The backward pass goes over the graph for ``d x_dst`` and ``d att`` and over the transpose for ``d x_src``.
Shapes: T tasks, N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from weft.core.errors import InputError
from weft.ops import cpu
from weft.ops.attention.gat import coefficient_mask
from weft.ops.attention.gatv2_triton import attention_v2_backward_triton, attention_v2_forward_triton
from weft.ops.csr.adjacency import Adjacency, supplied_by_adjacency
from weft.ops.csr.packed import (
    PackedCSR,
    pack_csr_backward,
    pack_csr_by_length,
    segment_log_sum_exp,
    segment_softmax,
    segment_sum,
    unpack_csr,
)
from weft.ops.dense.bias_act_dropout import as_rate, lead_task
from weft.ops.launch.backend import accumulate_dtype, custom_op, use_triton


def _edge_scores(x_src: Tensor, x_dst: Tensor, att: Tensor, slope: float, csr: PackedCSR) -> tuple[Tensor, Tensor]:
    """``(argument [..., E, H, D], score [..., E, H])`` in the accumulation type."""
    acc = accumulate_dtype(x_src.dtype)
    argument = x_src.index_select(-3, csr.indices.long()).to(acc) + x_dst.index_select(-3, csr.rows()).to(acc)
    return argument, (leaky_relu(argument, slope) * att[..., None, :, :].to(acc)).sum(-1)


def attention_v2_torch(x_src, x_dst, att, slope, mask, csr: PackedCSR) -> Tensor:
    """Reference, differentiable by autograd: materialises ``[..., E, H, D]``."""
    _, scores = _edge_scores(x_src, x_dst, att, slope, csr)
    alpha = segment_softmax(scores, csr)
    if mask is not None:
        alpha = alpha * mask
    messages = alpha[..., None] * x_src.index_select(-3, csr.indices.long()).to(alpha.dtype)
    return segment_sum(messages.flatten(-2), csr).unflatten(-1, x_src.shape[-2:]).to(x_src.dtype)


def attention_v2_forward_torch(x_src, x_dst, att, slope, rate, clock, site, csr: PackedCSR):
    """``(out, log of the softmax's denominator)``: reference for the fused forward."""
    mask = coefficient_mask(rate, clock, site, csr.num_edges, x_src.shape[-2])
    out = attention_v2_torch(x_src, x_dst, att, slope, mask, csr)
    _, scores = _edge_scores(x_src, x_dst, att, slope, csr)
    return out, segment_log_sum_exp(scores, csr)


def attention_v2_backward_torch(grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, csr: PackedCSR):
    """``(grad_x_src, grad_x_dst, grad_att)``: reference for the two passes of the backward."""
    cols, rows = csr.indices.long(), csr.rows()
    argument, scores = _edge_scores(x_src, x_dst, att, slope, csr)
    acc = scores.dtype
    alpha = (scores - log_sum.index_select(-2, rows)).exp()
    mask = coefficient_mask(rate, clock, site, csr.num_edges, x_src.shape[-2])
    kept = alpha if mask is None else alpha * mask
    grad_e = grad.index_select(-3, rows).to(acc)
    dots = (grad_e * x_src.index_select(-3, cols).to(acc)).sum(-1)
    d_score = kept * dots - alpha * delta.index_select(-2, rows)
    slope_e = torch.where(argument > 0, 1.0, slope).to(acc)
    d_argument = d_score[..., None] * slope_e * att[..., None, :, :].to(acc)
    grad_att = (d_score[..., None] * argument * slope_e).sum(-3).sum_to_size(att.shape)
    grad_dst = x_dst.new_zeros(x_dst.shape, dtype=acc).index_add(-3, rows, d_argument)
    grad_src = x_src.new_zeros(x_src.shape, dtype=acc)
    grad_src = grad_src.index_add(-3, cols, d_argument + kept[..., None] * grad_e)
    return grad_src.to(x_src.dtype), grad_dst.to(x_dst.dtype), grad_att.to(att.dtype)


@custom_op(
    "weft::graph_attention_v2",
    mutates_args=(),
    schema=(
        "(Tensor x_src, Tensor x_dst, Tensor att, float slope, Tensor? rate, Tensor? clock, int site,"
        " Tensor[] csr, Tensor[] back) -> (Tensor, Tensor)"
    ),
)
def _op(x_src, x_dst, att, slope, rate, clock, site, csr, back):
    opened = unpack_csr(csr)
    if use_triton(x_src):
        return attention_v2_forward_triton(x_src, x_dst, att, slope, rate, clock, site, opened)
    if cpu.serves(x_src, x_dst, att):
        return cpu.attention_v2_forward(x_src, x_dst, att, slope, rate, clock, site, opened)
    return attention_v2_forward_torch(x_src, x_dst, att, slope, rate, clock, site, opened)


@custom_op(
    "weft::graph_attention_v2_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor x_src, Tensor x_dst, Tensor att, Tensor delta, Tensor log_sum, float slope,"
        " Tensor? rate, Tensor? clock, int site, Tensor[] csr, Tensor[] back) -> (Tensor, Tensor, Tensor)"
    ),
)
def _backward_op(grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, csr, back):
    opened = unpack_csr(csr)
    if use_triton(x_src):
        return attention_v2_backward_triton(
            grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, opened, unpack_csr(back)
        )
    if cpu.serves(x_src, x_dst, att):
        return cpu.attention_v2_backward(
            grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, opened, unpack_csr(back)
        )
    return attention_v2_backward_torch(grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, opened)


@_op.register_fake
def _fake(x_src, x_dst, att, slope, rate, clock, site, csr, back):
    out = torch.empty_like(x_dst, memory_format=torch.contiguous_format)
    return out, out.new_empty(out.shape[:-1], dtype=accumulate_dtype(out.dtype))


@_backward_op.register_fake
def _backward_fake(grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, csr, back):
    contiguous = torch.contiguous_format
    return tuple(torch.empty_like(v, memory_format=contiguous) for v in (x_src, x_dst, att))


def _setup(ctx, inputs, output):
    x_src, x_dst, att, ctx.slope, rate, clock, ctx.site, ctx.csr, ctx.back = inputs
    ctx.save_for_backward(x_src, x_dst, att, rate, clock, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else autograd materialises zeros for outputs without gradients


def _backward(ctx, grad, _):
    x_src, x_dst, att, rate, clock, out, log_sum = ctx.saved_tensors
    nothing = [None] * len(ctx.csr), [None] * len(ctx.back)
    if grad is None:
        return None, None, None, None, None, None, None, *nothing
    grad = grad.contiguous()
    acc = accumulate_dtype(out.dtype)
    delta = (grad.to(acc) * out.to(acc)).sum(-1)
    grads = _backward_op(grad, x_src, x_dst, att, delta, log_sum, ctx.slope, rate, clock, ctx.site, ctx.csr, ctx.back)
    return *grads, None, None, None, None, *nothing


_op.register_autograd(_backward, setup_context=_setup)


@_op.register_vmap
def _vmap(info, in_dims, x_src, x_dst, att, slope, rate, clock, site, csr, back):
    lead = [lead_task(v, d, info.batch_size) for v, d in zip((x_src, x_dst, att), in_dims[:3], strict=True)]
    rate, clock = lead_task(rate, in_dims[4], info.batch_size), lead_task(clock, in_dims[5], info.batch_size)
    return _op(*lead, slope, rate, clock, site, csr, back), (0, 0)


@_backward_op.register_vmap
def _backward_vmap(info, in_dims, grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, csr, back):
    tensors = (grad, x_src, x_dst, att, delta, log_sum)
    lead = [lead_task(v, d, info.batch_size) for v, d in zip(tensors, in_dims[:6], strict=True)]
    rate, clock = lead_task(rate, in_dims[7], info.batch_size), lead_task(clock, in_dims[8], info.batch_size)
    return _backward_op(*lead, slope, rate, clock, site, csr, back), (0, 0, 0)


@supplied_by_adjacency
def graph_attention_v2(
    adj: Adjacency,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    slope: float = 0.2,
    dropout: float | Tensor = 0.0,
    clock: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """GATv2's attention: ``x_src [..., M, H, D]``, ``x_dst [..., N, H, D]``, ``att [..., H, D]``.

    Returns ``[..., N, H, D]``. ``dropout`` falls on the normalised coefficients and needs a ``clock``.
    """
    if x_src.shape[-3] != adj.num_cols or x_dst.shape[-3] != adj.num_rows:
        raise InputError(
            f"graph_attention_v2: x_src has {x_src.shape[-3]} rows and x_dst {x_dst.shape[-3]};"
            f" the adjacency is {adj.num_rows} x {adj.num_cols}"
        )
    rate = as_rate(dropout, x_src.device) if clock is not None else None
    clock = None if rate is None else clock
    csr = pack_csr_by_length(adj)  # the gradient of att is a sum over all rows
    return _op(x_src, x_dst, att, slope, rate, clock, site, csr, pack_csr_backward(adj))[0]
