"""Operators that weaving adds (copies, pushes), and the launchers of all operators that can share launches.

A launcher is code that only launches kernels. Only such code can be collected: it reads none of its results, which are
complete once its launches have run. Arguments are those of the operators' schemas; results are tensors, or a function
that returns them and is called after all launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.capture.costs import INDEX, WEFT, Work, _edges, bytes_out
from weft.capture.observer import ObservedCall
from weft.ops.attention import gatv2  # noqa: F401  as the three below: registers the operators that are launched here
from weft.ops.attention.gat import take_apart
from weft.ops.attention.gat_triton import (
    attention_backward_triton,
    attention_forward_triton,
    attention_row_gradient_triton,
)
from weft.ops.attention.gatv2 import attention_v2_backward_launches, attention_v2_forward_triton
from weft.ops.attention.mean_heads import mean_heads_triton
from weft.ops.csr.packed import PackedCSR, unpack_csr
from weft.ops.dense import adam  # noqa: F401
from weft.ops.dense.adam import adam_triton
from weft.ops.dense.bias_act_dropout import (
    BACKWARD_BIAS_SCHEMA,
    bias_act_dropout_backward_bias_torch,
    bias_act_dropout_backward_bias_triton,
    bias_act_dropout_backward_triton,
    bias_act_dropout_triton,
    column_sum_torch,
    column_sum_triton,
)
from weft.ops.dense.cross_entropy import (
    cross_entropy_parts_triton,
    cross_entropy_rows_backward_triton,
    cross_entropy_rows_torch,
)
from weft.ops.dense.linear import BACKWARD_ARGUMENTS, HALF, NARROW, linear_backward_torch, weight_grad_torch
from weft.ops.dense.linear_triton import (
    choose_weight_grad_launch,
    linear_backward_triton,
    linear_triton,
    weight_grad_triton,
)
from weft.ops.dense.tiles_triton import add_parts as add_parts_triton
from weft.ops.launch.backend import accumulate_dtype, custom_op, limits_of, use_triton
from weft.ops.launch.triton_lang import flatten_tasks, tl, triton, triton_acc
from weft.ops.sparse import sddmm, spmm  # noqa: F401
from weft.ops.sparse.edge_softmax import edge_softmax_triton
from weft.ops.sparse.sddmm import sddmm_triton
from weft.ops.sparse.spmm import choose_launch, spmm_triton
from weft.ops.sparse.spmm_max import spmm_max_backward_triton, spmm_max_triton
from weft.weave.merged_launch import FlatCalls, OpCall, collected, count_results, unflatten

# ---- Split-K operators as two operators each: the partial results, and their reduction.
#
# A weight gradient, a bias gradient or a loss is split over the whole device and its parts are added in a second
# launch. Only the update at the end of the step reads that sum; as an operator of its own it can be merged with any
# later launch, instead of delaying the launches that follow.
#
# Each ``*_parts`` runs all launches of its operator except the last, and returns ``partial [T, P, K]``; ``add_parts``
# is the last. If an operator launches nothing (on a CPU, or in a library), its whole result is the only part. With
# ``launch=False`` results are allocated but not computed.
#
# Shapes: T tasks, P parts, K results per task.


LEAST_ROWS = 64  # below which a weight gradient is one tile's work


def _first_phase(launcher: Callable[[], Any], summed: Callable[[Any], Tensor], launch: bool) -> tuple[Any, Tensor]:
    """What ``launcher`` returns, and the parts that its last launch would add; the launches before it are made.

    ``summed`` picks, out of what it returns, the result of the reduction, ``[T, K]``: the only part if there is no
    reduction.
    """
    with collected() as launches:
        out = launcher()
    adds = bool(launches) and "partial" in launches[-1].names and "first" in launches[-1].names
    for each in launches[: -1 if adds else None] if launch else ():
        each()
    if not adds:
        return out, summed(out)[:, None]
    return out, dict(zip(launches[-1].names, launches[-1].arguments, strict=True))["partial"]


def _flat(value: Tensor, dims: int) -> Tensor:
    """``[..., *rest]`` to ``[T, K]``, ``dims`` dimensions in ``rest``, as a copy."""
    lead = value.shape[: value.dim() - dims].numel()
    return value.reshape(lead, -1).clone(memory_format=torch.contiguous_format)


def weight_grad_parts(grad: Tensor, x: Tensor, *, launch: bool = True) -> Tensor:
    """Parts of ``grad^T x``, ``[T, P, O * I]``."""
    if not use_triton(x):
        return _flat(weight_grad_torch(grad, x), 2)[:, None]
    # Alone, a result much smaller than a tile goes to cuBLAS; in a merged launch the tile is free.
    suits = x.dtype != torch.float64 and x.shape[-2] >= LEAST_ROWS and grad.numel()
    sizes = (grad.shape[-1], x.shape[-1], grad.shape[:-2].numel())
    tiles = choose_weight_grad_launch(*sizes, limits_of(x.device)) if suits else None
    return _first_phase(lambda: weight_grad_triton(grad, x, tiles), lambda out: _flat(out, 2), launch)[1]


def column_sum_parts(x: Tensor, *, launch: bool = True) -> Tensor:
    """Parts of the sums over the rows of ``x [..., N, F]``, ``[T, P, F]``."""
    if not use_triton(x):
        return _flat(column_sum_torch(x), 1)[:, None]
    return _first_phase(lambda: column_sum_triton(x), lambda out: _flat(out, 1), launch)[1]


def backward_bias_parts(grad, out, bias_shape, act, rate, clock, site, parts=1, *, launch: bool = True):
    """The gradient to the epilogue's input, and parts of that to its bias, ``[T, P, F]``."""
    run = bias_act_dropout_backward_bias_triton if use_triton(grad) else bias_act_dropout_backward_bias_torch
    arguments = grad, out, torch.Size(bias_shape), act, rate, clock, site, parts
    (grad_x, _), partial = _first_phase(lambda: run(*arguments), lambda made: _flat(made[1], 1), launch)
    return grad_x, partial


def linear_backward_parts(*arguments: Any, launch: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """``(g, grad_x)`` and parts of ``(grad_W, grad_b)``, ``[T, P, O * I + O]``."""
    run = linear_backward_triton if use_triton(arguments[2]) else linear_backward_torch
    (grad_in, grad_x, _, _), partial = _first_phase(
        lambda: run(*arguments), lambda made: torch.cat([_flat(made[2], 2), _flat(made[3], 1)], 1), launch
    )
    return grad_in, grad_x, partial


def cross_entropy_parts(logits: Tensor, labels: Tensor, rows: Tensor, *, launch: bool = True) -> Tensor:
    """Parts of the mean loss, ``[T, P, 1]``."""
    if not use_triton(logits):
        return _flat(cross_entropy_rows_torch(logits, labels, rows)[..., None], 1)[:, None]
    with collected() as launches:
        partial = cross_entropy_parts_triton(logits, labels, rows)
    for each in launches if launch else ():
        each()
    return partial


def _register(name: str, parts: Callable[..., Any], schema: str) -> None:
    op = custom_op(f"weft::{name}_parts", mutates_args=(), schema=schema)(lambda *args: parts(*args))
    op.register_fake(lambda *args: parts(*args, launch=False))


_register("weight_grad", weight_grad_parts, "(Tensor grad, Tensor x) -> Tensor")
_register("column_sum", column_sum_parts, "(Tensor x) -> Tensor")
_register("bias_act_dropout_backward_bias", backward_bias_parts, BACKWARD_BIAS_SCHEMA)
_register("linear_backward", linear_backward_parts, f"{BACKWARD_ARGUMENTS} -> (Tensor, Tensor, Tensor)")
_register("cross_entropy_rows", cross_entropy_parts, "(Tensor logits, Tensor labels, Tensor rows) -> Tensor")


def add_parts(partial: Tensor, first: int, second: int, dtype: str) -> tuple[Tensor, ...]:
    """``partial [T, P, first + second]`` summed over P: ``[T, first]`` and ``[T, second]`` of the type ``dtype``."""
    kind = getattr(torch, dtype)
    if use_triton(partial) and partial.numel():
        return add_parts_triton(partial, (first, second), kind)
    total = partial[:, 0] if partial.shape[1] == 1 else partial.sum(1)
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in total.to(kind).split((first, second), 1))


ADD_PARTS = "(Tensor partial, int first, int second, str dtype) -> (Tensor, Tensor)"


@custom_op("weft::add_parts", ADD_PARTS)(add_parts).register_fake
def _add_parts_fake(partial, first, second, dtype):
    return tuple(partial.new_empty(partial.shape[0], size, dtype=getattr(torch, dtype)) for size in (first, second))


# ---- Copies as kernel launches: transposes, concatenation of rows, zeros
#
#     copied(x)          [A, B, C] of any strides to the same numbers, contiguous
#     side_by_side(xs)   [T, K_1], [T, K_2], ... to [T, K_1 + K_2 + ...]
#
# On small graphs launches dominate a step, and transposing one weight costs as much as a layer: the copies of all
# members go into one launch.
#
# Shapes: T tasks, K numbers per task.

BLOCK = 1024
DIMENSIONS = 3  # of what one launch copies


@triton.jit
def _copy_kernel(x, out, count, size_b, size_c, step_a, step_b, step_c, step_out, BLOCK: tl.constexpr):
    """``out[a, b, c] = x[a, b, c]``; in ``out`` b and c are contiguous and a is ``step_out`` elements apart."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    c = element % size_c
    b = (element // size_c) % size_b
    a = element // (size_c * size_b)
    value = tl.load(x + a * step_a + b * step_b + c * step_c, mask=inside)
    tl.store(out + a * step_out + b * size_c + c, value, mask=inside)


@triton.jit
def _fill_kernel(out, count, BLOCK: tl.constexpr):
    """Zeros."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + element, tl.zeros([BLOCK], tl.float32).to(out.dtype.element_ty), mask=element < count)


def _copy(x: Tensor, out: Tensor, step_out: int) -> None:
    """Launch the copy of ``x``, at most three dimensions, to ``out``."""
    missing = DIMENSIONS - x.dim()
    (_, size_b, size_c), steps = (*(1,) * missing, *x.shape), (*(0,) * missing, *x.stride())
    _copy_kernel[(-(-x.numel() // BLOCK),)](x, out, x.numel(), size_b, size_c, *steps, step_out, BLOCK=BLOCK)


def zeros_triton(like: Tensor) -> Tensor:
    """Zeros of the shape and type of ``like``, contiguous, by a launch."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    if out.numel():
        _fill_kernel[(-(-out.numel() // BLOCK),)](out, out.numel(), BLOCK=BLOCK)
    return out


def copied_triton(x: Tensor) -> Tensor:
    """Launch the copy of ``x``; torch copies more than three dimensions."""
    if x.dim() > DIMENSIONS or not x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _copy(x, out, x.numel() // x.shape[0] if x.dim() == DIMENSIONS else 0)
    return out


@custom_op("weft::copied", mutates_args=(), schema="(Tensor x) -> Tensor")
def copied(x):
    """``x`` in memory of its own, contiguous."""
    return copied_triton(x) if use_triton(x) else x.clone(memory_format=torch.contiguous_format)


@copied.register_fake
def _copied_fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def side_by_side_triton(parts: Sequence[Tensor]) -> Tensor:
    """One launch per ``parts [T, K]``, or ``[K]``; all independent."""
    rows = [part if part.dim() == 2 else part[None] for part in parts]
    width = sum(part.shape[1] for part in rows)
    out = rows[0].new_empty(rows[0].shape[0], width)
    begin = 0
    for part in rows:
        if part.numel():
            _copy(part[:, None, :], out[:, begin:], width)
        begin += part.shape[1]
    return out if parts[0].dim() == 2 else out[0]


@custom_op("weft::side_by_side", mutates_args=(), schema="(Tensor[] parts) -> Tensor")
def side_by_side(parts):
    """``[T, K]`` each, of one type, to ``[T, sum of K]``; or ``[K]`` each."""
    return torch.cat(parts, -1)  # outside of a merged launch, torch's single launch is faster


@side_by_side.register_fake
def _side_by_side_fake(parts):
    return parts[0].new_empty(*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))


# ---- Pushes: rows sent along their edges
#
#     out[t, j, f] = col_scale[j] * sum over e = (j -> i) of weight[t, e] * row_scale[i] * x[t, i, f]
#
# It needs no transpose of the structure; rows are added atomically on a GPU, in another order on every run.


def push_torch(x, weight, row_scale, col_scale, csr: PackedCSR, num_cols: int) -> Tensor:
    """Reference: every row of ``x [..., N, F]`` added to the columns its edges come from, ``[..., M, F]``."""
    rows, cols = csr.rows(), csr.indices.long()
    messages = x.index_select(-2, rows).to(accumulate_dtype(x.dtype))
    if row_scale is not None:
        messages = messages * row_scale[rows][:, None]
    if weight is not None:
        messages = messages * weight[..., None]
    if col_scale is not None:
        messages = messages * col_scale[cols][:, None]
    return messages.new_zeros(*x.shape[:-2], num_cols, x.shape[-1]).index_add(-2, cols, messages)


@triton.jit
def _push_edges(
    indices, w, col_scale, out, value, edge, inside, f, in_f,
    F: tl.constexpr, HAS_W: tl.constexpr, HAS_CS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add ``value [L or 1, BF]`` to the rows of ``out`` at the sources of a vector of edges, atomically."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    factor = inside.to(ACC)
    if HAS_W:
        factor *= tl.load(w + edge, mask=inside, other=0.0).to(ACC)
    if HAS_CS:
        factor *= tl.load(col_scale + col, mask=inside, other=0.0).to(ACC)
    mask = inside[:, None] & in_f[None, :]
    tl.atomic_add(out + col[:, None] * F + f[None, :], value * factor[:, None], mask=mask, sem="relaxed")


@triton.jit
def _push_kernel(
    x, w, row_scale, col_scale, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    out, num_heavy, num_light, num_partial, M, N, stride_w,
    F: tl.constexpr, HAS_W: tl.constexpr, HAS_RS: tl.constexpr, HAS_CS: tl.constexpr, ACC: tl.constexpr,
    BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """One work item: its rows (of N) are pushed along their edges to the columns (of M)."""
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    x += task * N * F
    w += task * stride_w
    out += task * M * F
    if piece < num_heavy:
        start_one = tl.load(heavy_start + piece).to(tl.int64)
        length_one = tl.load(heavy_len + piece)
        row_one = tl.load(heavy_row + piece).to(tl.int64)
        if piece < num_partial:
            row_one = tl.load(hub_row + tl.load(hub_of_partial + piece)).to(tl.int64)
        value_one = tl.load(x + row_one * F + f, mask=in_f, other=0.0).to(ACC)
        if HAS_RS:
            value_one *= tl.load(row_scale + row_one).to(ACC)
        lane = tl.arange(0, BE)
        for first in range(0, length_one, BE):
            _push_edges(
                indices, w, col_scale, out, value_one[None, :], start_one + first + lane, first + lane < length_one,
                f, in_f, F, HAS_W, HAS_CS, ACC,
            )  # fmt: skip
    else:
        item = (piece - num_heavy) * BR + tl.arange(0, BR)
        valid = item < num_light
        start = tl.load(light_start + item, mask=valid, other=0).to(tl.int64)
        length = tl.load(light_len + item, mask=valid, other=0)
        row = tl.load(light_row + item, mask=valid, other=0).to(tl.int64)
        at = row[:, None] * F + f[None, :]
        value = tl.load(x + at, mask=valid[:, None] & in_f[None, :], other=0.0).to(ACC)
        if HAS_RS:
            value *= tl.load(row_scale + row, mask=valid, other=0.0).to(ACC)[:, None]
        for step in range(tl.max(length, 0)):
            _push_edges(
                indices, w, col_scale, out, value, start + step, step < length, f, in_f, F, HAS_W, HAS_CS, ACC
            )  # fmt: skip


def push_triton(
    x: Tensor, weight: Tensor | None, row_scale: Tensor | None, col_scale: Tensor | None, csr: PackedCSR, num_cols: int
) -> Tensor:  # fmt: skip
    """``[..., M, F]``: the transpose's product with ``x [..., N, F]``, in the accumulation type."""
    work, lead = csr.work, x.shape[:-2]
    x_TNF = flatten_tasks(x, 2)
    tasks, N, F = x_TNF.shape
    out = x.new_zeros(tasks, num_cols, F, dtype=accumulate_dtype(x.dtype))
    if out.numel() and N:
        launch = choose_launch(num_cols, F, x.element_size(), csr.num_edges / N, limits_of(x.device))
        per_task = weight is not None and weight.dim() > 1
        if weight is not None:
            weight = (weight.expand(*lead, csr.num_edges) if per_task else weight).contiguous()
        num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
        _push_kernel[(num_heavy + -(-num_light // launch.block_rows), -(-F // launch.block_features), tasks)](
            x_TNF, *(x_TNF if value is None else value for value in (weight, row_scale, col_scale)), csr.indices,
            work.heavy_start, work.heavy_len, work.heavy_row, work.light_start, work.light_len, work.light_row,
            work.hub_row, work.hub_of_partial, out, num_heavy, num_light, work.hub_of_partial.numel(), num_cols, N,
            csr.num_edges if per_task else 0,
            F=F, HAS_W=weight is not None, HAS_RS=row_scale is not None, HAS_CS=col_scale is not None,
            ACC=triton_acc(x.dtype), BR=launch.block_rows, BE=launch.block_edges, BF=launch.block_features,
            num_warps=launch.num_warps,
        )  # fmt: skip
    return out.reshape(*lead, num_cols, F)


@custom_op(
    "weft::spmm_push",
    schema="(Tensor x, Tensor? weight, Tensor? row_scale, Tensor? col_scale, Tensor[] csr, int num_cols) -> Tensor",
)
def _push_op(x, weight, row_scale, col_scale, csr, num_cols):
    if use_triton(x):
        return push_triton(x, weight, row_scale, col_scale, unpack_csr(csr), num_cols)
    return push_torch(x, weight, row_scale, col_scale, unpack_csr(csr), num_cols).contiguous()


@_push_op.register_fake
def _push_fake(x, weight, row_scale, col_scale, csr, num_cols):
    return x.new_empty(*x.shape[:-2], num_cols, x.shape[-1], dtype=accumulate_dtype(x.dtype))


# ---- Launchers

Tensors = tuple[Tensor, ...]


def _spmm(x, weight, row_scale, col_scale, csr, back, weight_back) -> Tensor:
    return spmm_triton(x, weight, row_scale, col_scale, unpack_csr(csr))


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


def _attention_v2_backward(
    grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, csr, back
) -> Callable[[], Tensors]:
    return attention_v2_backward_launches(
        grad, x_src, x_dst, att, delta, log_sum, slope, rate, clock, site, unpack_csr(csr), unpack_csr(back)
    )


def _linear(x, weight, bias, add, act, rate, clock, site) -> Tensor | Tensors:
    if not _multiplies(x, weight):
        return OpCall("linear", (x, weight, bias, add, act, rate, clock, site))()
    return linear_triton(x, weight, bias, add, act, rate, clock, site)


def _multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether Weft's kernel computes the product; outside of a merged launch, one of few rows goes to cuBLAS."""
    return x.dtype in (torch.float32, *HALF) and max(weight.shape[-2:]) <= NARROW


INDEPENDENT = frozenset({"side_by_side"})  # operators whose launches are independent
LAUNCHERS: dict[str, Callable[..., Tensor | Tensors | Callable[[], Tensors] | None]] = {
    "spmm": _spmm,
    "spmm_push": lambda x, weight, row_scale, col_scale, csr, num_cols: push_triton(
        x, weight, row_scale, col_scale, unpack_csr(csr), num_cols
    ),
    "spmm_max": lambda x, weight, csr, back: spmm_max_triton(x, weight, unpack_csr(csr)),
    "spmm_max_backward": lambda grad, winner, weight, csr, back: spmm_max_backward_triton(
        grad, winner, weight, unpack_csr(back)
    ),
    "sddmm": lambda a, b, heads, csr, back: sddmm_triton(a, b, heads, unpack_csr(csr)),
    "edge_softmax": lambda scores, csr: edge_softmax_triton(scores, unpack_csr(csr)),
    "edge_softmax_backward": lambda grad, out, csr: edge_softmax_triton(out, unpack_csr(csr), grad),
    "graph_attention_packed": _attention_packed,
    "graph_attention_packed_backward": _attention_packed_backward,
    "graph_attention_v2": lambda x_src, x_dst, att, slope, rate, clock, site, csr, back: attention_v2_forward_triton(
        x_src, x_dst, att, slope, rate, clock, site, unpack_csr(csr)
    ),
    "graph_attention_v2_backward": _attention_v2_backward,
    "linear": _linear,
    "product": lambda x, weight: (
        linear_triton(x, weight) if _multiplies(x, weight) else OpCall("product", (x, weight))()
    ),
    "cross_entropy_rows_backward": lambda grad_loss, logits, labels, rows: cross_entropy_rows_backward_triton(
        grad_loss, logits, labels, rows, zeros=zeros_triton
    ),
    "adam_": adam_triton,
    "bias_act_dropout": bias_act_dropout_triton,
    "bias_act_dropout_backward": bias_act_dropout_backward_triton,
    "bias_act_dropout_backward_bias_parts": backward_bias_parts,
    "mean_heads": mean_heads_triton,
    "linear_backward_parts": linear_backward_parts,
    "weight_grad_parts": weight_grad_parts,
    "column_sum_parts": column_sum_parts,
    "cross_entropy_rows_parts": cross_entropy_parts,
    "add_parts": add_parts,
    "copied": copied_triton,
    "side_by_side": side_by_side_triton,
}


# ---- Costs of the operators that weaving adds


def _spmm_push(call: ObservedCall) -> Work:
    """Rows pushed along the edges: read sequentially, added at their destinations."""
    x, edges = call.argument("x"), _edges(call)
    row, tasks = x.shape[-1] * x.itemsize, prod(x.shape[:-2])
    return Work(
        flops=2 * edges * x.shape[-1] * tasks,
        stream=edges * INDEX * tasks + x.bytes + bytes_out(call),
        gather=2 * edges * row * tasks,
    )


def _merged_call(call: ObservedCall) -> Work:
    """Several operators in one launch: the sum of what each costs."""
    parts, outs = unflatten(FlatCalls(*call.args)), iter(call.outs or ())
    total = Work()
    for part in parts:
        name, mine = f"weft.{part.name}", [next(outs) for _ in range(count_results(part.name))]
        work = WEFT[name](replace(call, name=name, args=part.arguments, outs=mine))
        total = Work(total.flops + work.flops, total.stream + work.stream, total.gather + work.gather)
    return total


def register() -> None:
    """Register the costs of these operators; each costs what the operator it belongs to costs."""
    whole = {
        "weight_grad_parts": "weight_grad",
        "linear_backward_parts": "linear_backward",
        "column_sum_parts": "column_sum",
        "bias_act_dropout_backward_bias_parts": "bias_act_dropout_backward_bias",
        "cross_entropy_rows_parts": "cross_entropy_rows",
        "add_parts": "column_sum",
        "copied": "column_sum",
        "side_by_side": "column_sum",
    }
    WEFT.update({f"weft.{part}": WEFT[f"weft.{operator}"] for part, operator in whole.items()})
    WEFT.update({"weft.spmm_push": _spmm_push, "weft.merged_call": _merged_call, "weft.merged_call_": _merged_call})
