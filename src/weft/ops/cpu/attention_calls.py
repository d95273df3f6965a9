"""Calls of the CPU kernels for attention.

Shapes: T tasks, N rows, M columns, E edges, F features, H heads, D features of a head.
"""

from __future__ import annotations

import math

import torch

from weft.ops.cpu.call_parts import Dropout, kernels_of, like, order_of
from weft.ops.cpu.threads import count_shares, run_shares
from weft.ops.csr.packed import PackedCSR


def attention_forward(x, a_src, a_dst, slope, rate, clock, site, csr: PackedCSR):
    """``(out, out_plus, alpha_plus, log_sum)``; see :func:`weft.ops.attention.gat.attention_forward_torch`."""
    lead, (M, H, D), N, E = x.shape[:-3], x.shape[-3:], csr.num_rows, csr.num_edges
    x, a_src, a_dst = x.contiguous(), a_src.contiguous(), a_dst.contiguous()
    out, log_sum = x.new_empty(*lead, N, H, D), x.new_empty(*lead, N, H)
    out_plus, alpha_plus = torch.empty_like(out), torch.empty_like(log_sum)
    random = Dropout(rate, clock, site, lead)
    T = math.prod(lead)
    arguments = (
        out.data_ptr(), out_plus.data_ptr(), alpha_plus.data_ptr(), log_sum.data_ptr(), x.data_ptr(),
        a_src.data_ptr(), a_dst.data_ptr(), csr.indptr.data_ptr(), csr.indices.data_ptr(), *random.arguments,
        random.active, slope, T, N, M, E, H, D, like(x.dtype), like(csr.indptr.dtype),
    )  # fmt: skip
    if out.numel():
        run_shares(kernels_of().attention_share, arguments, count_shares(T * E * H * (2 * D + 16)))
    return out, out_plus, alpha_plus, log_sum


def attention_backward(
    grad, x, a_src, a_dst, delta, log_sum, slope, rate, clock, site, csr: PackedCSR, back: PackedCSR
):
    """``(grad_x, grad_a_src)``; see :func:`weft.ops.attention.gat.attention_backward_torch`."""
    lead, (M, H, D), N, E = x.shape[:-3], x.shape[-3:], csr.num_rows, csr.num_edges
    given = [value.contiguous() for value in (grad, x, a_src, a_dst, delta, log_sum)]
    grad_x = x.new_empty(x.shape)
    grad_a_src = a_src.new_empty(a_src.shape)
    perm = order_of(back)
    random = Dropout(rate, clock, site, lead)
    T = math.prod(lead)
    arguments = (
        grad_x.data_ptr(), grad_a_src.data_ptr(), *(value.data_ptr() for value in given), back.indptr.data_ptr(),
        back.indices.data_ptr(), perm.data_ptr(), *random.arguments, random.active, slope, T, N, M, E, H, D,
        like(x.dtype), like(back.indptr.dtype),
    )  # fmt: skip
    if grad_x.numel():
        run_shares(kernels_of().attention_backward_share, arguments, count_shares(T * E * H * (2 * D + 16)))
    return grad_x, grad_a_src


def attention_v2_forward(x_src, x_dst, att, slope, rate, clock, site, csr: PackedCSR):
    """``(out, log_sum)``; see :func:`weft.ops.attention.gatv2.attention_v2_forward_torch`."""
    lead, (M, H, D), N, E = x_src.shape[:-3], x_src.shape[-3:], csr.num_rows, csr.num_edges
    x_src, x_dst, att = x_src.contiguous(), x_dst.contiguous(), att.contiguous()
    out, log_sum = x_src.new_empty(*lead, N, H, D), x_src.new_empty(*lead, N, H)
    random = Dropout(rate, clock, site, lead)
    T = math.prod(lead)
    arguments = (
        out.data_ptr(), log_sum.data_ptr(), x_src.data_ptr(), x_dst.data_ptr(), att.data_ptr(),
        H * D if att.dim() > 2 else 0, csr.indptr.data_ptr(), csr.indices.data_ptr(), *random.arguments,
        random.active, slope, T, N, M, E, H, D, like(x_src.dtype), like(csr.indptr.dtype),
    )  # fmt: skip
    if out.numel():
        run_shares(kernels_of().attention_v2_share, arguments, count_shares(T * E * H * (3 * D + 16)))
    return out, log_sum


def attention_v2_backward(
    grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, csr: PackedCSR, back: PackedCSR
):
    """``(grad_x_src, grad_x_dst, grad_att)``; see :func:`weft.ops.attention.gatv2.attention_v2_backward_torch`."""
    lead, (M, H, D), N, E = x_src.shape[:-3], x_src.shape[-3:], csr.num_rows, csr.num_edges
    grad, x_src, x_dst, att = grad.contiguous(), x_src.contiguous(), x_dst.contiguous(), att.contiguous()
    delta, log_sum = delta.contiguous(), log_sum.contiguous()
    random = Dropout(rate, clock, site, lead)
    T = math.prod(lead)
    shares = count_shares(T * E * H * (4 * D + 16))
    d_score = grad.new_empty(T, E, H)
    kept, partial_att = torch.empty_like(d_score), grad.new_zeros(shares, *lead, H, D)
    grad_src, grad_dst = torch.empty_like(x_src), torch.empty_like(x_dst)
    inputs = (grad.data_ptr(), x_src.data_ptr(), x_dst.data_ptr(), att.data_ptr(), H * D if att.dim() > 2 else 0)
    edges = (d_score.data_ptr(), kept.data_ptr())
    sizes = (slope, T, N, M, E, H, D, like(grad.dtype))
    if grad_dst.numel():
        arguments = (
            grad_dst.data_ptr(), partial_att.data_ptr(), *edges, *inputs, delta.data_ptr(), log_sum.data_ptr(),
            csr.indptr.data_ptr(), csr.indices.data_ptr(), *random.arguments, random.active, *sizes,
            like(csr.indptr.dtype),
        )  # fmt: skip
        run_shares(kernels_of().attention_v2_target_share, arguments, shares)
    if grad_src.numel():
        perm = order_of(back)
        arguments = (
            grad_src.data_ptr(), *edges, *inputs, back.indptr.data_ptr(), back.indices.data_ptr(), perm.data_ptr(),
            *sizes, like(back.indptr.dtype),
        )  # fmt: skip
        run_shares(kernels_of().attention_v2_source_share, arguments, shares)
    grad_att = partial_att.sum(0)
    return grad_src, grad_dst, grad_att if att.dim() > 2 else grad_att.reshape(-1, H, D).sum(0)
