"""graph_attention_packed: GAT's attention over one matrix that holds the rows and their scores side by side.

    packed[n] = [ x[n, 0, :] ... x[n, H-1, :] | a_src[n, :] | a_dst[n, :] ]        H*D + 2H wide

One product makes all of it (the scores are linear in the layer's input as well), and the gradient comes back as one
matrix, so that the layer's backward is one product and one weight gradient instead of two of each and a sum.

Shapes: T tasks, N nodes, H heads, D features of a head; the adjacency is square.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.attention.gat import attend, attend_backward
from weft.ops.attention.gat_triton import attention_backward_triton, attention_row_gradient_triton
from weft.ops.csr.adjacency import Adjacency, supplied_by_adjacency
from weft.ops.csr.packed import pack_csr, pack_csr_backward, unpack_csr
from weft.ops.dense.bias_act_dropout import as_rate, lead_task
from weft.ops.launch.backend import accumulate_dtype, custom_op, use_triton


def take_apart(packed: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(x [..., N, H, D], a_src [..., N, H], a_dst [..., N, H])`` as views of ``packed [..., N, H*D + 2H]``."""
    width = packed.shape[-1] - 2 * heads
    x, a_src, a_dst = packed.split([width, heads, heads], -1)
    return x.unflatten(-1, (heads, width // heads)), a_src, a_dst


@custom_op(
    "weft::graph_attention_packed",
    mutates_args=(),
    schema=(
        "(Tensor packed, int heads, float slope, Tensor? rate, Tensor? clock, int site, Tensor[] csr, Tensor[] back)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _op(packed, heads, slope, rate, clock, site, csr, back):
    x, a_src, a_dst = take_apart(packed.contiguous(), heads)
    return attend(x, a_src, a_dst, slope, rate, clock, site, unpack_csr(csr), bool(back))


@custom_op(
    "weft::graph_attention_packed_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor packed, Tensor out, Tensor out_plus, Tensor alpha_plus, Tensor log_sum, float slope,"
        " Tensor? rate, Tensor? clock, int site, Tensor[] csr, Tensor[] back) -> Tensor"
    ),
)
def _backward_op(grad, packed, out, out_plus, alpha_plus, log_sum, slope, rate, clock, site, csr, back):
    heads = grad.shape[-2]
    packed = packed.contiguous()
    x, a_src, a_dst = take_apart(packed, heads)
    result = torch.empty_like(packed)
    into_x, into_src, into_dst = take_apart(result, heads)
    if use_triton(grad):
        stats, _ = attention_row_gradient_triton(grad, out, out_plus, alpha_plus, a_dst, log_sum, slope, into=into_dst)
        attention_backward_triton(
            grad, x, a_src, stats, slope, rate, clock, site, unpack_csr(back), into=(into_x, into_src)
        )
        return result
    saved = (out, out_plus, alpha_plus, log_sum)
    grads = attend_backward(grad, x, a_src, a_dst, saved, slope, rate, clock, site, unpack_csr(csr), unpack_csr(back))
    for into, value in zip((into_x, into_src, into_dst), grads, strict=True):
        into.copy_(value)
    return result


@_op.register_fake
def _fake(packed, heads, slope, rate, clock, site, csr, back):
    width = (packed.shape[-1] - 2 * heads) // heads
    out = packed.new_empty(*packed.shape[:-1], heads, width)
    stats = packed.new_empty(*packed.shape[:-1], heads, dtype=accumulate_dtype(packed.dtype))
    return out, out.new_empty(out.shape), stats, stats.new_empty(stats.shape)


@_backward_op.register_fake
def _backward_fake(grad, packed, out, out_plus, alpha_plus, log_sum, slope, rate, clock, site, csr, back):
    return torch.empty_like(packed, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    packed, _, ctx.slope, rate, clock, ctx.site, ctx.csr, ctx.back = inputs
    ctx.save_for_backward(packed, rate, clock, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else autograd materialises zeros for outputs without gradients


def _backward(ctx, grad, *_):
    packed, rate, clock, *saved = ctx.saved_tensors
    nothing = None, None, None, None, None, [None] * len(ctx.csr), [None] * len(ctx.back)
    if grad is None:
        return None, *nothing
    grad = _backward_op(grad, packed, *saved, ctx.slope, rate, clock, ctx.site, ctx.csr, ctx.back)
    return grad, *nothing


_op.register_autograd(_backward, setup_context=_setup)


@_op.register_vmap
def _vmap(info, in_dims, packed, heads, slope, rate, clock, site, csr, back):
    size = info.batch_size
    packed = lead_task(packed, in_dims[0], size)
    rate, clock = lead_task(rate, in_dims[3], size), lead_task(clock, in_dims[4], size)
    return _op(packed, heads, slope, rate, clock, site, csr, back), (0, 0, 0, 0)


@_backward_op.register_vmap
def _backward_vmap(
    info, in_dims, grad, packed, out, out_plus, alpha_plus, log_sum, slope, rate, clock, site, csr, back
):
    size = info.batch_size
    tensors = (grad, packed, out, out_plus, alpha_plus, log_sum)
    lead = [lead_task(v, d, size).contiguous() for v, d in zip(tensors, in_dims[:6], strict=True)]
    rate, clock = lead_task(rate, in_dims[7], size), lead_task(clock, in_dims[8], size)
    return _backward_op(*lead, slope, rate, clock, site, csr, back), 0


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
    rate = as_rate(dropout, packed.device) if clock is not None else None
    clock = None if rate is None else clock
    return _op(packed, heads, slope, rate, clock, site, pack_csr(adj), pack_csr_backward(adj))[0]
