"""CPU kernels for float32 and float64, compiled by numba; the torch references serve every other type.

Chosen by measurement (``benchmarks/suites/on_cpu/cpu_ops.py``, figures in ``results/cpu_ops.json``). On two cores
they are faster than the torch references by: spmm 9 to 130 times, bias + relu + dropout 10 to 50, attention 7 to 33,
softmax 3 to 6, elu 0.8 to 1.5. MKL's CSR product takes 0.6 (cora, F = 7) to 2.7 times (facebook, F = 64) as long as
spmm here; it is not used, because it wins by 20 us at most and needs one multiplied-out value per edge.
Results are bit-identical for any number of threads: a row is summed by one thread, in the order of its edges.
The functions here take tensors of any leading dimensions, as the references do, and pass addresses to kernels.
Numba is imported by the first call, not with the package.

Shapes: T tasks, N rows, M columns, E edges, F features, H heads, D features of a head.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.ops.csr.packed import PackedCSR
from weft.ops.launch.backend import once_for_all

COMPILED = (torch.float32, torch.float64)
NO_DROPOUT = (0, 0, 0, 0, 0)


def serves(*tensors: Tensor | None) -> bool:
    """Whether the compiled kernels take these tensors: all of one type, float32 or float64."""
    dtype = tensors[0].dtype
    return dtype in COMPILED and all(tensor is None or tensor.dtype == dtype for tensor in tensors)


@cache
def like(dtype: torch.dtype) -> np.ndarray:
    """An array from which a kernel takes the type behind an address."""
    return torch.empty(1, dtype=dtype).numpy()


@cache
def _one(dtype: torch.dtype) -> Tensor:
    """The factor of all edges if no factors are given."""
    return torch.ones(1, dtype=dtype)


def factors(values: Tensor | None, x: Tensor) -> tuple[Tensor, int]:
    """``(factors, step)``: a step of 0 stands for one number for all."""
    if values is None:
        return _one(x.dtype), 0
    return (values if values.dtype == x.dtype else values.to(x.dtype)).contiguous(), 1


def order_of(back: PackedCSR) -> Tensor:
    """Where each edge of a transpose stands in the original order, in the type of its offsets."""
    assert back.perm.numel() == back.num_edges, "this transpose was packed without its perm"
    return back.perm.to(back.indptr.dtype)


class Dropout:
    """The dropout of a group of tasks: what kernels take, and the tensors behind their addresses."""

    def __init__(self, rate: Tensor | None, clock: Tensor | None, site: int, lead: torch.Size) -> None:
        self.active, self.arguments = rate is not None, NO_DROPOUT
        if rate is None:
            return
        rate = rate.to(torch.float32)
        self.rate = rate.expand(lead).contiguous() if rate.dim() else rate
        self.clock = (clock.expand(*lead, 2) if clock.dim() > 1 else clock).contiguous()
        steps = min(self.rate.dim(), 1), 2 * min(clock.dim() - 1, 1)
        self.arguments = (self.rate.data_ptr(), steps[0], self.clock.data_ptr(), steps[1], site)


WORK_OF_A_SHARE = 1 << 19  # multiply-adds, about 60 us; handing work over costs about 30 us
MOST_SHARES = 64


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads of a process; a forked child does not inherit them and gets its own.

    Kernels run without the GIL, so ordinary threads suffice, and they sleep between calls: numba's own pool would
    compete with torch's for the same cores.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix="weft-cpu")


def count_shares(work: int) -> int:
    """Shares to split ``work`` multiply-adds into: by the work alone, so that results do not depend on threads."""
    return max(1, min(MOST_SHARES, work // WORK_OF_A_SHARE))


def run_shares(kernel: Callable[..., Any], arguments: Sequence[Any], shares: int) -> None:
    """Call ``kernel(*arguments, share, shares)`` for every share, on as many threads as torch would use."""
    todo = deque(range(shares))

    def work_off() -> None:
        while True:
            try:
                share = todo.popleft()
            except IndexError:
                return
            kernel(*arguments, share, shares)

    helpers = min(torch.get_num_threads(), shares) - 1
    pool = _pool(os.getpid(), torch.get_num_threads()) if helpers > 0 else None
    waiting = [pool.submit(work_off) for _ in range(helpers)] if pool else []
    work_off()
    for future in waiting:
        future.result()


@cache
def _compiled(name: str) -> Callable[..., Any]:
    """The kernel ``"module.function"``; the first call imports numba."""
    module, _, function = name.partition(".")
    return getattr(import_module(f"weft.ops.cpu.{module}"), function)


def _launch(name: str, result: Tensor, arguments: Sequence[Any], work: int) -> None:
    """Run the kernel ``name``, of ``work`` multiply-adds, unless its ``result`` is empty."""
    if result.numel():
        run_shares(_compiled(name), arguments, count_shares(work))


# ---- attention


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
    _launch("attention.forward_share", out, arguments, T * E * H * (2 * D + 16))
    return out, out_plus, alpha_plus, log_sum


def attention_backward(
    grad, x, a_src, a_dst, delta, log_sum, slope, rate, clock, site, csr: PackedCSR, back: PackedCSR
):
    """``(grad_x, grad_a_src)``; see :func:`weft.ops.attention.gat.attention_backward_torch`."""
    lead, (M, H, D), N, E = x.shape[:-3], x.shape[-3:], csr.num_rows, csr.num_edges
    inputs = [value.contiguous() for value in (grad, x, a_src, a_dst, delta, log_sum)]
    grad_x = x.new_empty(x.shape)
    grad_a_src = a_src.new_empty(a_src.shape)
    perm = order_of(back)
    random = Dropout(rate, clock, site, lead)
    T = math.prod(lead)
    arguments = (
        grad_x.data_ptr(), grad_a_src.data_ptr(), *(value.data_ptr() for value in inputs), back.indptr.data_ptr(),
        back.indices.data_ptr(), perm.data_ptr(), *random.arguments, random.active, slope, T, N, M, E, H, D,
        like(x.dtype), like(back.indptr.dtype),
    )  # fmt: skip
    _launch("attention.backward_share", grad_x, arguments, T * E * H * (2 * D + 16))
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
    _launch("attention_v2.forward_share", out, arguments, T * E * H * (3 * D + 16))
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
    coefficients, partial_att = torch.empty_like(d_score), grad.new_zeros(shares, *lead, H, D)
    grad_src, grad_dst = torch.empty_like(x_src), torch.empty_like(x_dst)
    inputs = (grad.data_ptr(), x_src.data_ptr(), x_dst.data_ptr(), att.data_ptr(), H * D if att.dim() > 2 else 0)
    edges = (d_score.data_ptr(), coefficients.data_ptr())
    sizes = (slope, T, N, M, E, H, D, like(grad.dtype))
    if grad_dst.numel():
        arguments = (
            grad_dst.data_ptr(), partial_att.data_ptr(), *edges, *inputs, delta.data_ptr(), log_sum.data_ptr(),
            csr.indptr.data_ptr(), csr.indices.data_ptr(), *random.arguments, random.active, *sizes,
            like(csr.indptr.dtype),
        )  # fmt: skip
        run_shares(_compiled("attention_v2.target_share"), arguments, shares)
    if grad_src.numel():
        perm = order_of(back)
        arguments = (
            grad_src.data_ptr(), *edges, *inputs, back.indptr.data_ptr(), back.indices.data_ptr(), perm.data_ptr(),
            *sizes, like(back.indptr.dtype),
        )  # fmt: skip
        run_shares(_compiled("attention_v2.source_share"), arguments, shares)
    grad_att = partial_att.sum(0)
    return grad_src, grad_dst, grad_att if att.dim() > 2 else grad_att.reshape(-1, H, D).sum(0)


# ---- bias, activation and dropout

ACTIVATION_CODE = {"none": 0, "relu": 1, "elu": 2}
WORK_OF_ACT = {"none": 8, "relu": 8, "elu": 16}  # multiply-adds that cost as much as one element


def bias_act_dropout(
    x: Tensor, bias: Tensor | None, act: str, rate: Tensor | None, clock: Tensor | None, site: int, parts: int = 1
) -> Tensor:
    """See :func:`weft.ops.dense.bias_act_dropout.bias_act_dropout_torch`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    lead = x.shape[:0] if clock is None else clock.shape[:-1]
    x = once_for_all(x, len(lead))
    random = Dropout(rate, clock, site, lead)
    B, has_bias = math.prod(lead), bias is not None
    bias = bias.contiguous() if has_bias else x
    groups = math.prod(bias.shape[:-1]) if has_bias else 1
    arguments = (
        out.data_ptr(), x.data_ptr(), x.numel(), bias.data_ptr(), *random.arguments, B, out.numel() // max(B, 1),
        x.shape[-1] // parts, groups, x.shape[-1], ACTIVATION_CODE[act], has_bias, random.active, like(x.dtype),
    )  # fmt: skip
    _launch("dropout_kernel.forward_share", out, arguments, WORK_OF_ACT[act] * out.numel())
    return out


def bias_act_dropout_backward(
    grad: Tensor, out: Tensor, act: str, rate: Tensor | None, clock: Tensor | None, site: int, parts: int = 1
) -> Tensor:
    """See :func:`weft.ops.dense.bias_act_dropout.bias_act_dropout_backward_torch`."""
    grad, out = grad.contiguous(), out.contiguous()
    result = torch.empty_like(grad)
    lead = grad.shape[:0] if clock is None else clock.shape[:-1]
    random = Dropout(rate, clock, site, lead)
    B = math.prod(lead)
    arguments = (
        result.data_ptr(), grad.data_ptr(), out.data_ptr(), *random.arguments, B, grad.numel() // max(B, 1),
        grad.shape[-1] // parts, ACTIVATION_CODE[act], random.active, like(grad.dtype),
    )  # fmt: skip
    _launch("dropout_kernel.backward_share", result, arguments, WORK_OF_ACT[act] * grad.numel())
    return result


# ---- over edges: SpMM, SDDMM, softmax and maximum


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
    _launch("edges.spmm_share", out, arguments, T * (E + N) * F)
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
    _launch("edges.sddmm_share", out, arguments, T * E * width)
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
    _launch("edges.softmax_share", out, arguments, 16 * T * E * H)
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
    _launch("edges.softmax_backward_share", result, arguments, 8 * T * E * H)
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
    _launch("edges.spmm_max_share", out, arguments, 2 * T * (E + N) * F)
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
        shares = min(count_shares(8 * T * N * F), T * -(-F // _compiled("edges.BLOCK")))
        run_shares(_compiled("edges.spmm_max_backward_share"), arguments, shares)
    return result
