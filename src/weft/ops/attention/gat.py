"""graph_attention: GAT's scores, softmax and weighted sum in one pass, without per-edge arrays in memory.

    s[e, h]      = leaky_relu(a_src[j, h] + a_dst[i, h])                    for e = (j -> i)
    alpha[e, h]  = softmax of s over the in-edges of i
    out[i, h, :] = sum over e of keep[e, h] / (1 - rate) * alpha[e, h] * x[j, h, :]

The backward pass is one pass over the transpose. With ``delta = <grad, out>`` per row and head,

    d s[e]    = alpha[e] * (keep / (1 - rate) * <grad[i], x[j]> - delta[i])
    d x[j]    = sum over e of keep / (1 - rate) * alpha[e] * grad[i]
    d a_src[j] = sum over the out-edges of j of d s[e] * slope(e)

and ``d a_dst[i]``, a sum over in-edges, needs no second pass: since the d s of a row sum to zero and slope(e)
takes two values, it is ``(1 - slope) * (<grad, out_plus> - delta * alpha_plus)``, where ``out_plus`` and
``alpha_plus`` are the forward sums restricted to edges with a positive argument. The forward pass keeps them.

Shapes: T tasks, N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from weft.core.errors import InputError
from weft.ops import cpu
from weft.ops.attention.gat_triton import (
    attention_backward_triton,
    attention_forward_triton,
    attention_row_gradient_triton,
)
from weft.ops.csr.adjacency import Adjacency, supplied_by_adjacency
from weft.ops.csr.packed import (
    PackedCSR,
    pack_csr,
    pack_csr_backward,
    segment_log_sum_exp,
    segment_softmax,
    segment_sum,
    unpack_csr,
)
from weft.ops.launch.backend import accumulate_dtype, batch_tasks, custom_op, rate_and_clock, use_triton
from weft.ops.random_bits import keep_mask_rows


def coefficient_mask(
    rate: Tensor | None, clock: Tensor | None, site: int, num_edges: int, heads: int, first: int = 0
) -> Tensor | None:
    """``keep / (1 - rate)`` per edge and head ``[..., E, H]``: an edge is a row, counted from ``first``."""
    if rate is None:
        return None
    keep = keep_mask_rows(rate.expand(clock.shape[:-1]), clock, site, num_edges, heads, first)
    return torch.where(keep, (1.0 / (1.0 - rate.to(torch.float32)))[..., None, None], 0.0)


def attention_torch(
    x: Tensor, a_src: Tensor, a_dst: Tensor, slope: float, mask: Tensor | None, csr: PackedCSR
) -> Tensor:
    """Reference, differentiable by autograd: materialises ``[..., E, H, D]``."""
    cols, rows = csr.indices.long(), csr.rows()
    acc = accumulate_dtype(x.dtype)
    scores = leaky_relu(a_src.index_select(-2, cols).to(acc) + a_dst.index_select(-2, rows).to(acc), slope)
    alpha = segment_softmax(scores, csr)
    if mask is not None:
        alpha = alpha * mask
    messages = alpha[..., None] * x.index_select(-3, cols).to(acc)
    out = segment_sum(messages.flatten(-2), csr)
    return out.unflatten(-1, x.shape[-2:]).to(x.dtype)


def attention_forward_torch(x, a_src, a_dst, slope, rate, clock, site, csr: PackedCSR):
    """``(out, out_plus, alpha_plus, log of the softmax's denominator)``: reference for the fused forward."""
    cols, rows = csr.indices.long(), csr.rows()
    acc = accumulate_dtype(x.dtype)
    argument = a_src.index_select(-2, cols).to(acc) + a_dst.index_select(-2, rows).to(acc)
    scores = leaky_relu(argument, slope)
    alpha = segment_softmax(scores, csr)
    mask = coefficient_mask(rate, clock, site, csr.num_edges, x.shape[-2])
    dropped = alpha if mask is None else alpha * mask
    positive = (argument > 0).to(acc)
    gathered = x.index_select(-3, cols).to(acc)
    out = segment_sum((dropped[..., None] * gathered).flatten(-2), csr).unflatten(-1, x.shape[-2:])
    out_plus = segment_sum(((dropped * positive)[..., None] * gathered).flatten(-2), csr).unflatten(-1, x.shape[-2:])
    alpha_plus = segment_sum(alpha * positive, csr)
    return out.to(x.dtype), out_plus.to(x.dtype), alpha_plus, segment_log_sum_exp(scores, csr)


def attention_row_gradient_torch(grad, out, out_plus, alpha_plus, a_dst, log_sum, slope: float):
    """``(stats [..., N, 3, H], grad_a_dst [..., N, H])``; stats are a_dst, log_sum and delta.

    Side by side, the three numbers per edge from its destination cost one cache line, not three; heads run
    fastest, so that one load takes the same statistic for all of them.
    """
    acc = log_sum.dtype
    delta = (grad.to(acc) * out.to(acc)).sum(-1)
    plus = (grad.to(acc) * out_plus.to(acc)).sum(-1)
    stats = torch.stack([a_dst.to(acc), log_sum, delta], -2)
    return stats, ((1.0 - slope) * (plus - delta * alpha_plus)).to(a_dst.dtype)


def attention_backward_torch(grad, x, a_src, stats, slope, rate, clock, site, csr: PackedCSR):
    """``(grad_x [..., M, H, D], grad_a_src [..., M, H])``: reference for the pass over the transpose."""
    a_dst, log_sum, delta = stats.unbind(-2)
    cols, rows = csr.indices.long(), csr.rows()
    acc = accumulate_dtype(x.dtype)
    argument = a_src.index_select(-2, cols).to(acc) + a_dst.index_select(-2, rows).to(acc)
    alpha = (leaky_relu(argument, slope) - log_sum.index_select(-2, rows)).exp()
    mask = coefficient_mask(rate, clock, site, csr.num_edges, x.shape[-2])
    gathered = grad.index_select(-3, rows).to(acc)
    dots = (gathered * x.index_select(-3, cols).to(acc)).sum(-1)
    dropped = alpha if mask is None else alpha * mask
    d_score = dropped * dots - alpha * delta.index_select(-2, rows)
    d_argument = torch.where(argument > 0, d_score, d_score * slope)
    grad_x = x.new_zeros(x.shape, dtype=acc).index_add(-3, cols, dropped[..., None] * gathered)
    grad_a = a_src.new_zeros(a_src.shape, dtype=acc).index_add(-2, cols, d_argument)
    return grad_x.to(x.dtype), grad_a.to(a_src.dtype)


def attend(x, a_src, a_dst, slope, rate, clock, site, csr: PackedCSR, training: bool):
    """``(out, out_plus, alpha_plus, log_sum)`` by the backend of the tensors' device."""
    if use_triton(x):
        return attention_forward_triton(x, a_src, a_dst, slope, rate, clock, site, csr, training)
    serve = cpu.attention_forward if cpu.serves(x, a_src, a_dst) else attention_forward_torch
    return serve(x.contiguous(), a_src.contiguous(), a_dst.contiguous(), slope, rate, clock, site, csr)


def _gradients(
    grad, x, a_src, a_dst, out, out_plus, alpha_plus, log_sum, slope, rate, clock, site, csr, back, into=None
):
    """``(grad_x, grad_a_src, grad_a_dst)`` by the backend of the device; on a GPU ``into`` three tensors if given."""
    rows = grad, out, out_plus, alpha_plus, a_dst, log_sum, slope
    if use_triton(x):
        *into_source, into_target = into or (None,)
        stats, grad_a_dst = attention_row_gradient_triton(*rows, into=into_target)
        given = grad, x, a_src, stats, slope, rate, clock, site, unpack_csr(back)
        return *attention_backward_triton(*given, into=into_source), grad_a_dst
    stats, grad_a_dst = attention_row_gradient_torch(*rows)
    grad, x, a_src, csr = grad.contiguous(), x.contiguous(), a_src.contiguous(), unpack_csr(csr)
    if cpu.serves(x, a_src):
        a_dst, log_sum, delta = (value.contiguous() for value in stats.unbind(-2))
        given = grad, x, a_src, a_dst, delta, log_sum, slope, rate, clock, site, csr, unpack_csr(back)
        return *cpu.attention_backward(*given), grad_a_dst
    return *attention_backward_torch(grad, x, a_src, stats, slope, rate, clock, site, csr), grad_a_dst


@custom_op(
    "weft::graph_attention",
    "(Tensor x, Tensor a_src, Tensor a_dst, float slope, Tensor? rate, Tensor? clock, int site,"
    " Tensor[] csr, Tensor[] back) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _op(x, a_src, a_dst, slope, rate, clock, site, csr, back):
    return attend(x, a_src, a_dst, slope, rate, clock, site, unpack_csr(csr), bool(back))


_backward_op = custom_op(
    "weft::graph_attention_backward",
    "(Tensor grad, Tensor x, Tensor a_src, Tensor a_dst, Tensor out, Tensor out_plus, Tensor alpha_plus,"
    " Tensor log_sum, float slope, Tensor? rate, Tensor? clock, int site, Tensor[] csr, Tensor[] back)"
    " -> (Tensor, Tensor, Tensor)",
)(_gradients)


@_op.register_fake
def _fake(x, a_src, a_dst, slope, rate, clock, site, csr, back):
    rows = csr[0].shape[0] - 1
    out = x.new_empty(*x.shape[:-3], rows, *x.shape[-2:])
    stats = x.new_empty(*x.shape[:-3], rows, x.shape[-2], dtype=accumulate_dtype(x.dtype))
    return out, torch.empty_like(out), stats, torch.empty_like(stats)


def register_gradient(op: Any, gradients: Callable[..., tuple[Tensor, ...]]) -> None:
    """Register the backward pass of an attention, whose arguments end with slope, rate, clock, site, csr and back.

    ``gradients(grad, *tensors, *outputs, slope, rate, clock, site, csr, back)`` returns one per tensor argument.
    """

    def setup(ctx, inputs, output):
        *own, ctx.slope, rate, clock, ctx.site, ctx.csr, ctx.back = inputs
        ctx.arguments = len(own) + 4  # before csr and back
        ctx.save_for_backward(rate, clock, *(value for value in own if isinstance(value, Tensor)), *output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # else autograd materialises zeros for outputs without gradients

    def backward(ctx, grad, *_):
        rate, clock, *saved = ctx.saved_tensors
        grads = ()
        if grad is not None:
            grads = gradients(grad, *saved, ctx.slope, rate, clock, ctx.site, ctx.csr, ctx.back)
        return *grads, *(None,) * (ctx.arguments - len(grads)), [None] * len(ctx.csr), [None] * len(ctx.back)

    op.register_autograd(backward, setup_context=setup)


register_gradient(_op, _backward_op)
batch_tasks(_op)
batch_tasks(_backward_op, contiguous=range(8), like=(1, 2, 3))


@supplied_by_adjacency
def graph_attention(
    adj: Adjacency,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    slope: float = 0.2,
    dropout: float | Tensor = 0.0,
    clock: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """GAT's attention over ``x [..., M, H, D]`` with ``a_src [..., M, H]``, ``a_dst [..., N, H]``.

    Returns ``[..., N, H, D]``. ``dropout`` falls on the normalised coefficients and needs a ``clock``.
    """
    if x.shape[-3] != adj.num_cols or a_dst.shape[-2] != adj.num_rows:
        raise InputError(
            f"graph_attention: x has {x.shape[-3]} rows and a_dst {a_dst.shape[-2]};"
            f" the adjacency is {adj.num_rows} x {adj.num_cols}"
        )
    rate, clock = rate_and_clock(dropout, clock, x.device)
    csr, back = pack_csr(adj), pack_csr_backward(adj)
    return _op(x, a_src, a_dst, slope, rate, clock, site, csr, back)[0]


# ---- graph_attention_packed: GAT's attention over one matrix that holds the rows and their scores side by side
#     packed[n] = [ x[n, 0, :] ... x[n, H-1, :] | a_src[n, :] | a_dst[n, :] ]        H*D + 2H wide
#
# One product makes all of it (the scores are linear in the layer's input as well), and the gradient comes back as one
# matrix, so that the layer's backward is one product and one weight gradient instead of two of each and a sum.


def take_apart(packed: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(x [..., N, H, D], a_src [..., N, H], a_dst [..., N, H])`` as views of ``packed [..., N, H*D + 2H]``."""
    width = packed.shape[-1] - 2 * heads
    x, a_src, a_dst = packed.split([width, heads, heads], -1)
    return x.unflatten(-1, (heads, width // heads)), a_src, a_dst


@custom_op(
    "weft::graph_attention_packed",
    "(Tensor packed, int heads, float slope, Tensor? rate, Tensor? clock, int site, Tensor[] csr, Tensor[] back)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _packed_op(packed, heads, slope, rate, clock, site, csr, back):
    x, a_src, a_dst = take_apart(packed.contiguous(), heads)
    return attend(x, a_src, a_dst, slope, rate, clock, site, unpack_csr(csr), bool(back))


@custom_op(
    "weft::graph_attention_packed_backward",
    "(Tensor grad, Tensor packed, Tensor out, Tensor out_plus, Tensor alpha_plus, Tensor log_sum, float slope,"
    " Tensor? rate, Tensor? clock, int site, Tensor[] csr, Tensor[] back) -> Tensor",
)
def _packed_backward_op(grad, packed, out, out_plus, alpha_plus, log_sum, slope, rate, clock, site, csr, back):
    heads = grad.shape[-2]
    packed = packed.contiguous()
    x, a_src, a_dst = take_apart(packed, heads)
    result = torch.empty_like(packed)
    into = take_apart(result, heads)
    saved = out, out_plus, alpha_plus, log_sum, slope, rate, clock, site, csr, back
    grads = _gradients(grad, x, a_src, a_dst, *saved, into)
    if not use_triton(grad):
        for part, value in zip(into, grads, strict=True):
            part.copy_(value)
    return result


@_packed_op.register_fake
def _packed_fake(packed, heads, slope, rate, clock, site, csr, back):
    width = (packed.shape[-1] - 2 * heads) // heads
    out = packed.new_empty(*packed.shape[:-1], heads, width)
    stats = packed.new_empty(*packed.shape[:-1], heads, dtype=accumulate_dtype(packed.dtype))
    return out, out.new_empty(out.shape), stats, stats.new_empty(stats.shape)


register_gradient(_packed_op, lambda *arguments: (_packed_backward_op(*arguments),))
batch_tasks(_packed_op)
batch_tasks(_packed_backward_op, contiguous=range(6), like=(1,))


@supplied_by_adjacency
def graph_attention_packed(
    adj: Adjacency,
    packed: Tensor,
    heads: int,
    slope: float = 0.2,
    dropout: float | Tensor = 0.0,
    clock: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """GAT's attention over ``packed [..., N, H*D + 2H]`` = (rows, source scores, destination scores).

    Returns ``[..., N, H, D]``; the same as :func:`weft.ops.graph_attention` of the three parts.
    """
    if packed.shape[-2] != adj.num_rows or adj.num_rows != adj.num_cols:
        raise InputError(
            f"graph_attention_packed: packed has {packed.shape[-2]} rows; the adjacency is"
            f" {adj.num_rows} x {adj.num_cols} and must be square"
        )
    if packed.shape[-1] <= 2 * heads or packed.shape[-1] % heads:
        raise InputError(
            f"graph_attention_packed: a width of {packed.shape[-1]} is not heads * (D + 2) for heads={heads}"
        )
    rate, clock = rate_and_clock(dropout, clock, packed.device)
    return _packed_op(packed, heads, slope, rate, clock, site, pack_csr(adj), pack_csr_backward(adj))[0]
