"""spmm: one pass over the edges that sums or maximises neighbours' rows.

    out[t, i, f] = row_scale[i] * sum over e = (j -> i) of weight[t, e] * col_scale[j] * x[t, j, f]

Shapes: T tasks, N rows, M columns, E edges, F features. ``x_TMF`` may have any leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops import cpu
from weft.ops.adjacency import Adjacency
from weft.ops.backend import accumulate_dtype, next_power_of_2, use_triton
from weft.ops.lang import tl, triton
from weft.ops.sddmm import edge_dot
from weft.ops.walk import Walk, pack, pack_backward, unpack


def spmm_torch(
    x: Tensor, weight: Tensor | None, row_scale: Tensor | None, col_scale: Tensor | None, walk: Walk
) -> Tensor:
    """Reference: gather every edge's row, scale it, add it to its destination."""
    messages = _messages(x, weight, col_scale, walk)
    out = messages.new_zeros(*x.shape[:-2], walk.num_rows, x.shape[-1])
    out = out.index_add(-2, walk.rows(), messages)
    return (out if row_scale is None else out * row_scale[:, None]).to(x.dtype)


def _messages(x: Tensor, weight: Tensor | None, col_scale: Tensor | None, walk: Walk) -> Tensor:
    """``[..., E, F]`` in the accumulation type."""
    cols = walk.indices.long()
    messages = x.index_select(-2, cols).to(accumulate_dtype(x.dtype))
    if col_scale is not None:
        messages = messages * col_scale[cols][:, None]
    return messages if weight is None else messages * weight[..., None]


@triton.jit
def _row_sum(
    x,
    w,
    col_scale,
    indices,
    edge,
    inside,
    f,
    in_f,
    F,
    HAS_W: tl.constexpr,
    HAS_CS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Rows of x at the sources of a vector of edges, scaled: [len(edge), BF]."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    value = tl.load(x + col[:, None] * F + f[None, :], mask=inside[:, None] & in_f[None, :], other=0.0).to(
        ACC
    )
    if HAS_W:
        value *= tl.load(w + edge, mask=inside, other=0.0).to(ACC)[:, None]
    if HAS_CS:
        value *= tl.load(col_scale + col, mask=inside, other=0.0).to(ACC)[:, None]
    return value


@triton.jit
def _spmm_kernel(
    x, w, row_scale, col_scale, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row,
    out, partial, num_heavy, num_light, num_partial, F, stride_x, stride_w, stride_out, stride_partial,
    HAS_W: tl.constexpr, HAS_RS: tl.constexpr, HAS_CS: tl.constexpr, ACC: tl.constexpr,
    BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    x += task * stride_x
    w += task * stride_w
    out += task * stride_out
    partial += task * stride_partial
    if piece < num_heavy:
        start = tl.load(heavy_start + piece).to(tl.int64)
        length = tl.load(heavy_len + piece)
        row = tl.load(heavy_row + piece).to(tl.int64)
        lane = tl.arange(0, BE)
        total = tl.zeros([BE, BF], ACC)
        for first in range(0, length, BE):
            total += _row_sum(
                x,
                w,
                col_scale,
                indices,
                start + first + lane,
                first + lane < length,
                f,
                in_f,
                F,
                HAS_W,
                HAS_CS,
                ACC,
            )
        sum_f = tl.sum(total, 0)
        if piece < num_partial:
            tl.store(partial + piece.to(tl.int64) * F + f, sum_f, mask=in_f)
        else:
            if HAS_RS:
                sum_f *= tl.load(row_scale + row).to(ACC)
            tl.store(out + row * F + f, sum_f.to(out.dtype.element_ty), mask=in_f)
    else:
        item = (piece - num_heavy) * BR + tl.arange(0, BR)
        valid = item < num_light
        start = tl.load(light_start + item, mask=valid, other=0).to(tl.int64)
        length = tl.load(light_len + item, mask=valid, other=0)
        row = tl.load(light_row + item, mask=valid, other=0).to(tl.int64)
        longest = tl.max(length, 0)
        total = tl.zeros([BR, BF], ACC)
        for first in range(0, longest, UNROLL):
            for step in tl.static_range(UNROLL):
                total += _row_sum(
                    x,
                    w,
                    col_scale,
                    indices,
                    start + first + step,
                    first + step < length,
                    f,
                    in_f,
                    F,
                    HAS_W,
                    HAS_CS,
                    ACC,
                )
        if HAS_RS:
            total *= tl.load(row_scale + row, mask=valid, other=0.0).to(ACC)[:, None]
        tl.store(
            out + row[:, None] * F + f[None, :],
            total.to(out.dtype.element_ty),
            mask=valid[:, None] & in_f[None, :],
        )


@triton.jit
def _add_partials_kernel(
    partial, hub_ptr, hub_row, row_scale, out, F, stride_partial, stride_out,
    HAS_RS: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Add the partial rows of one hub, BP at a time and always in the same order."""
    hub = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    first = tl.load(hub_ptr + hub)
    last = tl.load(hub_ptr + hub + 1)
    row = tl.load(hub_row + hub).to(tl.int64)
    total = tl.zeros([BP, BF], ACC)
    for base in range(first, last, BP):
        slot = base + tl.arange(0, BP)
        at = partial + task * stride_partial + slot.to(tl.int64)[:, None] * F + f[None, :]
        total += tl.load(at, mask=(slot < last)[:, None] & in_f[None, :], other=0.0)
    sum_f = tl.sum(total, 0)
    if HAS_RS:
        sum_f *= tl.load(row_scale + row).to(ACC)
    tl.store(out + task * stride_out + row * F + f, sum_f.to(out.dtype.element_ty), mask=in_f)


@dataclass(frozen=True)
class SpmmLaunch:
    """Launch parameters: rows and features of a light tile, edges of a heavy one, unrolling, warps."""

    block_rows: int
    block_edges: int
    block_features: int
    unroll: int = 4
    num_warps: int = 4


def choose_launch(num_cols: int, num_features: int, itemsize: int) -> SpmmLaunch:
    """Feature tile: the whole row when it is short, else the widest tile whose columns stay in the L2."""
    block_features = min(next_power_of_2(num_features), 128)
    while (
        block_features > 32
        and num_features > block_features // 2
        and num_cols * block_features * itemsize > L2_BYTES
    ):
        if num_cols * 32 * itemsize > L2_BYTES:
            break  # no useful tile fits: keep whole cache lines
        block_features //= 2
    block_rows = max(1, 1024 // block_features)
    return SpmmLaunch(block_rows, block_rows, block_features)


L2_BYTES = 40 * 2**20  # of an H200's 60 MB, leaving room for indices and output


def spmm_triton(
    x: Tensor,
    weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    walk: Walk,
    launch: SpmmLaunch | None = None,
) -> Tensor:
    """Launch the kernels over ``x [..., M, F]``; leading dimensions become tasks."""
    work = walk.work
    assert work is not None
    lead, (num_cols, num_features) = x.shape[:-2], x.shape[-2:]
    x_TMF = x.reshape(-1, num_cols, num_features).contiguous()
    tasks = x_TMF.shape[0]
    out_TNF = x.new_empty(tasks, walk.num_rows, num_features)
    if out_TNF.numel() == 0:
        return out_TNF.reshape(*lead, walk.num_rows, num_features)
    launch = launch or choose_launch(num_cols, num_features, x.element_size())
    acc = tl.float64 if x.dtype == torch.float64 else tl.float32
    num_partial = work.hub_of_partial.numel()
    partial = x.new_empty(tasks, max(num_partial, 1), num_features, dtype=accumulate_dtype(x.dtype))
    per_task_weight = weight is not None and weight.dim() > 1
    if weight is not None:
        weight = weight.reshape(-1, walk.num_edges).contiguous()
    num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
    feature_tiles = -(-num_features // launch.block_features)
    grid = (num_heavy + -(-num_light // launch.block_rows), feature_tiles, tasks)
    _spmm_kernel[grid](
        x_TMF, weight if weight is not None else x_TMF,
        row_scale if row_scale is not None else x_TMF, col_scale if col_scale is not None else x_TMF,
        walk.indices, work.heavy_start, work.heavy_len, work.heavy_row,
        work.light_start, work.light_len, work.light_row, out_TNF, partial,
        num_heavy, num_light, num_partial, num_features,
        x_TMF.stride(0), walk.num_edges if per_task_weight else 0, out_TNF.stride(0), partial.stride(0),
        HAS_W=weight is not None, HAS_RS=row_scale is not None, HAS_CS=col_scale is not None, ACC=acc,
        BR=launch.block_rows, BE=launch.block_edges, BF=launch.block_features, UNROLL=launch.unroll,
        num_warps=launch.num_warps,
    )  # fmt: skip
    if num_partial:
        _add_partials_kernel[(work.hub_row.numel(), feature_tiles, tasks)](
            partial, work.hub_ptr, work.hub_row, row_scale if row_scale is not None else x_TMF, out_TNF,
            num_features, partial.stride(0), out_TNF.stride(0),
            HAS_RS=row_scale is not None, ACC=acc, BP=16, BF=launch.block_features, num_warps=4,
        )  # fmt: skip
    return out_TNF.reshape(*lead, walk.num_rows, num_features)


@torch.library.custom_op(
    "weft::spmm",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor? weight, Tensor? row_scale, Tensor? col_scale, Tensor[] walk, Tensor[] back,"
        " Tensor? weight_back) -> Tensor"
    ),
)
def _spmm_op(x, weight, row_scale, col_scale, walk, back, weight_back):
    opened = unpack(walk)
    if use_triton(x):
        return spmm_triton(x, weight, row_scale, col_scale, opened)
    if cpu.serves(x, weight):
        return cpu.spmm(x, weight, row_scale, col_scale, opened)
    return spmm_torch(x, weight, row_scale, col_scale, opened)


@_spmm_op.register_fake
def _spmm_fake(x, weight, row_scale, col_scale, walk, back, weight_back):
    return x.new_empty(*x.shape[:-2], walk[0].shape[0] - 1, x.shape[-1])


def _spmm_setup(ctx, inputs, output):
    x, weight, row_scale, col_scale, walk, back, weight_back = inputs
    ctx.walk, ctx.back, ctx.wants_weight = walk, back, ctx.needs_input_grad[1]
    ctx.save_for_backward(x if ctx.wants_weight else None, weight, row_scale, col_scale, weight_back)


def _spmm_backward(ctx, grad):
    x, weight, row_scale, col_scale, weight_back = ctx.saved_tensors
    walk, back = ctx.walk, ctx.back
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        if weight is not None and weight_back is None:
            weight_back = weight.index_select(-1, unpack(back).perm.long())
        grad_x = _spmm_op(grad, weight_back, col_scale, row_scale, back, walk, weight)
    if ctx.wants_weight:
        grad_weight = _grad_weight(grad, x, weight, row_scale, col_scale, walk, back)
    return grad_x, grad_weight, None, None, [None] * len(walk), [None] * len(back), None


def _grad_weight(grad, x, weight, row_scale, col_scale, walk, back):
    """d weight[e] = <row_scale[i] grad[i], col_scale[j] x[j]>, summed over tasks that share the weight."""
    left = grad if row_scale is None else grad * row_scale[:, None].to(grad.dtype)
    right = x if col_scale is None else x * col_scale[:, None].to(x.dtype)
    dots = edge_dot(left, right, 1, walk, back).squeeze(-1)
    extra = dots.dim() - weight.dim()
    return (dots.sum(tuple(range(extra))) if extra else dots).to(weight.dtype)


_spmm_op.register_autograd(_spmm_backward, setup_context=_spmm_setup)


@_spmm_op.register_vmap
def _spmm_vmap(info, in_dims, x, weight, row_scale, col_scale, walk, back, weight_back):
    """T tasks over one graph are one call on ``[T, ..., M, F]``."""
    x_dim, weight_dim, weight_back_dim = in_dims[0], in_dims[1], in_dims[6]
    x = x.movedim(x_dim, 0) if x_dim is not None else x.expand(info.batch_size, *x.shape)
    if weight_dim is not None:
        weight = weight.movedim(weight_dim, 0)
    if weight_back_dim is not None:
        weight_back = weight_back.movedim(weight_back_dim, 0)
    return _spmm_op(x, weight, row_scale, col_scale, walk, back, weight_back), 0


def spmm(adj: Adjacency, x: Tensor, weight: Tensor | None = None, reduce: str = "sum") -> Tensor:
    """Aggregate the rows of ``x [..., M, F]`` over the in-edges of every row: ``[..., N, F]``.

    ``weight [E]`` (or ``[..., E]``, one set a task) multiplies the edges; it defaults to ``adj.weight`` and
    is differentiable. ``reduce`` is ``"sum"``, ``"mean"`` (the sum divided by the degree) or ``"max"``.
    Rows without edges give zeros.
    """
    if x.shape[-2] != adj.num_cols:
        raise InputError(
            f"spmm: x has {x.shape[-2]} rows, the adjacency has {adj.num_cols} columns; they must agree"
        )
    if reduce == "max":
        from weft.ops.spmm_max import spmm_max

        return spmm_max(adj, x)
    if reduce == "mean":
        adj = adj.mean()
    elif reduce != "sum":
        raise InputError(f"spmm: reduce={reduce!r} must be 'sum', 'mean' or 'max'")
    back = pack_backward(adj)
    weight_back = adj.transposed().weight if weight is None and back else None
    weight = adj.weight if weight is None else weight
    needs_rows = torch.is_grad_enabled() and weight is not None and weight.requires_grad
    walk = pack(adj, rows=needs_rows)
    return _spmm_op(x, weight, adj.row_scale, adj.col_scale, walk, back, weight_back)
