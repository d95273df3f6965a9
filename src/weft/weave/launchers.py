"""Launchers of the operators that can share launches: code that only launches kernels.

Only such code can be collected: it reads none of its results, which are complete once its launches have run. Arguments
are those of the operators' schemas; results are tuples, or a function that returns them and is called after all
launches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.ops.attention import gatv2  # noqa: F401  as the three below: registers the operators that are launched here
from weft.ops.attention.gat_backward_triton import attention_backward_triton, attention_row_gradient_triton
from weft.ops.attention.gat_forward_triton import attention_forward_triton
from weft.ops.attention.gat_packed import take_apart
from weft.ops.attention.gatv2_triton import attention_v2_backward_launches, attention_v2_forward_triton
from weft.ops.attention.mean_heads import mean_heads_triton
from weft.ops.csr.packed import unpack_csr
from weft.ops.dense.bias_act_dropout_triton import bias_act_dropout_backward_triton, bias_act_dropout_triton
from weft.ops.dense.linear import HALF, NARROW
from weft.ops.dense.linear_triton import linear_triton
from weft.ops.sparse import edge_softmax, sddmm, spmm  # noqa: F401
from weft.ops.sparse.sddmm_triton import sddmm_triton
from weft.ops.sparse.spmm_max_triton import spmm_max_backward_triton, spmm_max_triton
from weft.ops.sparse.spmm_triton import spmm_triton
from weft.ops.train import adam  # noqa: F401
from weft.ops.train.adam_triton import adam_triton
from weft.ops.train.cross_entropy_triton import cross_entropy_rows_backward_triton
from weft.weave.copies import copied_triton, side_by_side_triton, zeros_triton
from weft.weave.lab.edge_softmax_rows_triton import whole_edge_softmax_backward_triton, whole_edge_softmax_triton
from weft.weave.lab.push_triton import push_triton
from weft.weave.together import OpCall
from weft.weave.two_phase_ops import (
    add_parts,
    backward_bias_parts,
    column_sum_parts,
    cross_entropy_parts,
    linear_backward_parts,
    weight_grad_parts,
)

Tensors = tuple[Tensor, ...]


def _spmm(x, weight, row_scale, col_scale, csr, back, weight_back) -> Tensors:
    return (spmm_triton(x, weight, row_scale, col_scale, unpack_csr(csr)),)


def _push(x, weight, row_scale, col_scale, csr, num_cols) -> Tensors:
    return (push_triton(x, weight, row_scale, col_scale, unpack_csr(csr), num_cols),)


def _max(x, weight, csr, back) -> Tensors:
    return spmm_max_triton(x, weight, unpack_csr(csr))


def _max_backward(grad, winner, weight, csr, back) -> Tensors:
    return (spmm_max_backward_triton(grad, winner, weight, unpack_csr(back)),)


def _sddmm(a, b, heads, csr, back) -> Tensors:
    return (sddmm_triton(a, b, heads, unpack_csr(csr)),)


def _softmax(scores, csr) -> Tensors:
    return (whole_edge_softmax_triton(scores, unpack_csr(csr)),)


def _softmax_backward(grad, out, csr) -> Tensors:
    return (whole_edge_softmax_backward_triton(grad, out, unpack_csr(csr)),)


def _attention_packed(packed, heads, slope, rate, clock, site, csr, back) -> Tensors:
    x, a_src, a_dst = take_apart(packed.contiguous(), heads)
    return attention_forward_triton(x, a_src, a_dst, slope, rate, clock, site, unpack_csr(csr), bool(back))


def _attention_packed_backward(
    grad, packed, out, out_plus, alpha_plus, log_sum, slope, rate, clock, site, csr, back
) -> Tensors:
    heads, packed = grad.shape[-2], packed.contiguous()
    x, a_src, a_dst = take_apart(packed, heads)
    result = torch.empty_like(packed)
    into_x, into_src, into_dst = take_apart(result, heads)
    stats, _ = attention_row_gradient_triton(grad, out, out_plus, alpha_plus, a_dst, log_sum, slope, into=into_dst)
    attention_backward_triton(
        grad, x, a_src, stats, slope, rate, clock, site, unpack_csr(back), into=(into_x, into_src)
    )
    return (result,)


def _attention_v2(x_src, x_dst, att, slope, rate, clock, site, csr, back) -> Tensors:
    return attention_v2_forward_triton(x_src, x_dst, att, slope, rate, clock, site, unpack_csr(csr))


def _attention_v2_backward(
    grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, csr, back
) -> Callable[[], Tensors]:
    given = grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site
    return attention_v2_backward_launches(*given, unpack_csr(csr), unpack_csr(back))


def _linear(x, weight, bias, add, act, rate, clock, site) -> Tensors:
    if not _multiplies(x, weight):
        return OpCall("linear", (x, weight, bias, add, act, rate, clock, site))()
    return (linear_triton(x, weight, bias, add, act, rate, clock, site),)


def _product(x, weight) -> Tensors:
    return (linear_triton(x, weight),) if _multiplies(x, weight) else OpCall("product", (x, weight))()


def _multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether Weft's kernel computes the product; outside of a merged launch, one of few rows goes to cuBLAS."""
    return x.dtype in (torch.float32, *HALF) and max(weight.shape[-2:]) <= NARROW


def _cross_entropy_backward(grad_loss, logits, labels, rows) -> Tensors:
    return (cross_entropy_rows_backward_triton(grad_loss, logits, labels, rows, zeros=zeros_triton),)


def _adam(param, grad, exp_avg, exp_avg_sq, hyper, decay_mask, step) -> Tensors:
    adam_triton(param, grad, exp_avg, exp_avg_sq, hyper, decay_mask, step)
    return ()


def _one(launcher: Callable[..., Tensor]) -> Callable[..., Tensors]:
    """A launcher of one result."""
    return lambda *arguments: (launcher(*arguments),)


INDEPENDENT = frozenset({"side_by_side"})  # operators whose launches are independent
LAUNCHERS: dict[str, Callable[..., Tensors | Callable[[], Tensors]]] = {
    "spmm": _spmm,
    "spmm_push": _push,
    "spmm_max": _max,
    "spmm_max_backward": _max_backward,
    "sddmm": _sddmm,
    "edge_softmax": _softmax,
    "edge_softmax_backward": _softmax_backward,
    "graph_attention_packed": _attention_packed,
    "graph_attention_packed_backward": _attention_packed_backward,
    "graph_attention_v2": _attention_v2,
    "graph_attention_v2_backward": _attention_v2_backward,
    "linear": _linear,
    "product": _product,
    "cross_entropy_rows_backward": _cross_entropy_backward,
    "adam_": _adam,
    "bias_act_dropout": _one(bias_act_dropout_triton),
    "bias_act_dropout_backward": _one(bias_act_dropout_backward_triton),
    "bias_act_dropout_backward_bias_parts": backward_bias_parts,
    "mean_heads": _one(mean_heads_triton),
    "linear_backward_parts": linear_backward_parts,
    "weight_grad_parts": _one(weight_grad_parts),
    "column_sum_parts": _one(column_sum_parts),
    "cross_entropy_rows_parts": _one(cross_entropy_parts),
    "add_parts": add_parts,
    "copied": _one(copied_triton),
    "side_by_side": _one(side_by_side_triton),
}
