"""Calls of the CPU kernels over edges: SpMM, SDDMM, softmax and maximum.

Shapes: T tasks, N rows, M columns, E edges, F features, H heads, D features of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.ops.cpu.call_parts import factors, kernels_of, like
from weft.ops.cpu.threads import count_shares, run_shares
from weft.ops.csr.packed import PackedCSR


def spmm(
    x: Tensor, weight: Tensor | None, row_scale: Tensor | None, col_scale: Tensor | None, csr: PackedCSR
) -> Tensor:
    """``x [..., M, F]`` to ``[..., N, F]``; see :func:`weft.ops.sparse.spmm.spmm_torch`."""
    lead, (M, F), N, E = x.shape[:-2], x.shape[-2:], csr.num_rows, csr.num_edges
    x = x.contiguous()
    out = x.new_empty(*lead, N, F)
    T, stride = math.prod(lead), 0
    if weight is not None and weight.dim() > 1:
        weight, stride = weight.expand(*lead, E), E
    weight, weight_step = factors(weight, x)
    row_scale, row_step = factors(row_scale, x)
    col_scale, col_step = factors(col_scale, x)
    arguments = (
        out.data_ptr(), x.data_ptr(), weight.data_ptr(), weight_step, stride, row_scale.data_ptr(), row_step,
        col_scale.data_ptr(), col_step, csr.indptr.data_ptr(), csr.indices.data_ptr(), T, N, M, E, F,
        like(x.dtype), like(csr.indptr.dtype),
    )  # fmt: skip
    if out.numel():
        run_shares(kernels_of().spmm_share, arguments, count_shares(T * (E + N) * F))
    return out


def sddmm(a: Tensor, b: Tensor, heads: int, csr: PackedCSR) -> Tensor:
    """``a [..., N, H*D]``, ``b [..., M, H*D]`` to ``[..., E, H]``; see :func:`weft.ops.sparse.sddmm.sddmm_torch`."""
    lead, (N, width), M, E = a.shape[:-2], a.shape[-2:], b.shape[-2], csr.num_edges
    a, b = a.contiguous(), b.contiguous()
    out, T = a.new_empty(*lead, E, heads), math.prod(lead)
    arguments = (
        out.data_ptr(), a.data_ptr(), b.data_ptr(), csr.indptr.data_ptr(), csr.indices.data_ptr(),
        T, N, M, E, heads, width // heads, like(a.dtype), like(csr.indptr.dtype),
    )  # fmt: skip
    if out.numel():
        run_shares(kernels_of().sddmm_share, arguments, count_shares(T * E * width))
    return out


def edge_softmax(scores: Tensor, csr: PackedCSR) -> Tensor:
    """Softmax of ``scores [..., E, H]`` over each row; see :func:`weft.ops.sparse.edge_softmax.edge_softmax_torch`."""
    (E, H), T = scores.shape[-2:], math.prod(scores.shape[:-2])
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    arguments = (
        out.data_ptr(), scores.data_ptr(), csr.indptr.data_ptr(), T, csr.num_rows, E, H,
        like(scores.dtype), like(csr.indptr.dtype),
    )  # fmt: skip
    if out.numel():
        run_shares(kernels_of().softmax_share, arguments, count_shares(16 * T * E * H))
    return out


def edge_softmax_backward(grad: Tensor, out: Tensor, csr: PackedCSR) -> Tensor:
    """The gradient ``[..., E, H]`` to the scores."""
    (E, H), T = out.shape[-2:], math.prod(out.shape[:-2])
    grad, out = grad.contiguous(), out.contiguous()
    result = torch.empty_like(out)
    arguments = (
        result.data_ptr(), grad.data_ptr(), out.data_ptr(), csr.indptr.data_ptr(), T, csr.num_rows, E, H,
        like(out.dtype), like(csr.indptr.dtype),
    )  # fmt: skip
    if result.numel():
        run_shares(kernels_of().softmax_backward_share, arguments, count_shares(8 * T * E * H))
    return result


def spmm_max(x: Tensor, weight: Tensor | None, csr: PackedCSR) -> tuple[Tensor, Tensor]:
    """``(out, winner) [..., N, F]``; see :func:`weft.ops.sparse.spmm_max.spmm_max_torch`."""
    lead, (M, F), N, E = x.shape[:-2], x.shape[-2:], csr.num_rows, csr.num_edges
    x, T = x.contiguous(), math.prod(x.shape[:-2])
    out = x.new_empty(*lead, N, F)
    winner = torch.empty_like(out, dtype=csr.indptr.dtype)
    weight, step = factors(weight, x)
    arguments = (
        out.data_ptr(), winner.data_ptr(), x.data_ptr(), weight.data_ptr(), step, csr.indptr.data_ptr(),
        csr.indices.data_ptr(), T, N, M, F, like(x.dtype), like(csr.indptr.dtype),
    )  # fmt: skip
    if out.numel():
        run_shares(kernels_of().spmm_max_share, arguments, count_shares(2 * T * (E + N) * F))
    return out, winner


def spmm_max_backward(grad: Tensor, winner: Tensor, weight: Tensor | None, csr: PackedCSR, num_cols: int) -> Tensor:
    """The gradient ``[..., M, F]``; see :func:`weft.ops.sparse.spmm_max.spmm_max_backward_torch`."""
    lead, (N, F), T = grad.shape[:-2], grad.shape[-2:], math.prod(grad.shape[:-2])
    grad, winner = grad.contiguous(), winner.contiguous()
    result = grad.new_zeros(*lead, num_cols, F)
    weight, step = factors(weight, grad)
    arguments = (
        result.data_ptr(), grad.data_ptr(), winner.data_ptr(), weight.data_ptr(), step,
        csr.indices.data_ptr(), T, N, num_cols, F, like(grad.dtype), like(winner.dtype),
    )  # fmt: skip
    if result.numel():
        shares = min(count_shares(8 * T * N * F), T * -(-F // kernels_of().MAX_BLOCK))
        run_shares(kernels_of().spmm_max_backward_share, arguments, shares)
    return result
