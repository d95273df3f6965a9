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
from weft.ops.csr.adjacency import Adjacency, supplied_by_adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr, pack_csr_backward, unpack_csr
from weft.ops.csr.worklist import heavy_piece, light_rows
from weft.ops.launch.backend import (
    H200,
    DeviceLimits,
    accumulate_dtype,
    custom_op,
    limits_of,
    next_power_of_2,
    use_triton,
)
from weft.ops.launch.triton_lang import tl, triton, triton_acc
from weft.ops.sparse.lanes_triton import add_hub_parts
from weft.ops.sparse.sddmm import edge_dot

# ---- Triton kernels: bounded work items, partial sums for hubs, no atomics


@triton.jit
def _row_sum(
    x, w, col_scale, indices, edge, inside, f, in_f, F, HAS_W: tl.constexpr, HAS_CS: tl.constexpr, ACC: tl.constexpr
):
    """Rows of x at the sources of a vector of edges, scaled: [len(edge), BF]."""
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    value = tl.load(x + col[:, None] * F + f[None, :], mask=inside[:, None] & in_f[None, :], other=0.0).to(ACC)
    if HAS_W:
        value *= tl.load(w + edge, mask=inside, other=0.0).to(ACC)[:, None]
    if HAS_CS:
        value *= tl.load(col_scale + col, mask=inside, other=0.0).to(ACC)[:, None]
    return value


@triton.jit
def _spmm_kernel(
    x, w, row_scale, col_scale, indices,
    heavy_start, heavy_len, heavy_row, light_start, light_len, light_row,
    out, partial, num_heavy, num_light, num_partial, M, N, stride_w,
    F: tl.constexpr, HAS_W: tl.constexpr, HAS_RS: tl.constexpr, HAS_CS: tl.constexpr, ACC: tl.constexpr,
    BR: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, UNROLL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One work item and one tile of features of one task: a heavy row or chunk, or BR light rows.

    ADD: onto what is in ``out``; a row is one program's.
    """
    piece = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    in_f = f < F
    # Rows times a constant width: a stride known only at run time would cost the loads their alignment.
    x += task * M * F
    w += task * stride_w
    out += task * N * F
    partial += task * num_partial * F
    if piece < num_heavy:
        start_one, length_one = heavy_piece(piece, heavy_start, heavy_len)
        row_one = tl.load(heavy_row + piece).to(tl.int64)
        lane = tl.arange(0, BE)
        total_one = tl.zeros([BE, BF], ACC)
        # Unrolled as well: one edge of a lane in flight leaves a hub's chunk waiting for memory.
        for first_edge in range(0, length_one, BE * UNROLL):
            for more in tl.static_range(UNROLL):
                place = first_edge + more * BE + lane
                total_one += _row_sum(
                    x, w, col_scale, indices, start_one + place, place < length_one, f, in_f, F, HAS_W, HAS_CS, ACC
                )  # fmt: skip
        sum_f = tl.sum(total_one, 0)
        if piece < num_partial:
            tl.store(partial + piece.to(tl.int64) * F + f, sum_f, mask=in_f)
        else:
            if HAS_RS:
                sum_f *= tl.load(row_scale + row_one).to(ACC)
            if ADD:
                sum_f += tl.load(out + row_one * F + f, mask=in_f, other=0.0).to(ACC)
            tl.store(out + row_one * F + f, sum_f.to(out.dtype.element_ty), mask=in_f)
    else:
        item = (piece - num_heavy) * BR + tl.arange(0, BR)
        start, length, row, valid = light_rows(item, light_start, light_len, light_row, num_light)
        longest = tl.max(length, 0)
        total = tl.zeros([BR, BF], ACC)
        for base in range(0, longest, UNROLL):
            for step in tl.static_range(UNROLL):
                total += _row_sum(
                    x, w, col_scale, indices, start + base + step, base + step < length, f, in_f, F, HAS_W, HAS_CS, ACC
                )
        if HAS_RS:
            total *= tl.load(row_scale + row, mask=valid, other=0.0).to(ACC)[:, None]
        at, there = out + row[:, None] * F + f[None, :], valid[:, None] & in_f[None, :]
        if ADD:
            total += tl.load(at, mask=there, other=0.0).to(ACC)
        tl.store(at, total.to(out.dtype.element_ty), mask=there)


@dataclass(frozen=True)
class SpmmLaunch:
    """Launch parameters: rows and features of a light tile, edges of a heavy one, unrolling, warps."""

    block_rows: int
    block_edges: int
    block_features: int
    unroll: int = 4
    num_warps: int = 4


def choose_launch(
    num_cols: int, num_features: int, itemsize: int, mean_degree: float, limits: DeviceLimits = H200
) -> SpmmLaunch:
    """Launch parameters by the width of a row and whether a tile of every column stays in the L2.

    Tiles over features are processed one after another, so while ``num_cols * block_features`` fits the L2 each column
    is read from memory once. Measured on an H200 for F = 16, 64, 256, 1024 over pubmed, arxiv, reddit, products shapes.
    """
    width = next_power_of_2(num_features)
    if width <= 16:
        return SpmmLaunch(128, 128, width, 2, 4) if mean_degree > 64 else SpmmLaunch(32, 32, width, 4, 2)
    if width == 32:
        return SpmmLaunch(16, 16, 32, 4, 2)
    tile_bytes = num_cols * 64 * itemsize
    if width == 64:
        # Rows of 64 features, by whether all of them stay in an L1, in the L2, or in neither.
        half = itemsize == 2
        if half:
            return SpmmLaunch(16, 16, 64, 4, 2) if tile_bytes <= limits.l2_for_rows else SpmmLaunch(8, 8, 64, 8, 2)
        if tile_bytes <= limits.l1_for_rows:
            return SpmmLaunch(4, 4, 64, 4, 1)
        return SpmmLaunch(8, 8, 64, 4, 2 if tile_bytes <= limits.l2_for_rows else 4)
    if tile_bytes <= limits.l2_for_rows:
        return SpmmLaunch(8, 8, 128 if 2 * tile_bytes <= limits.l2_for_rows else 64, 4, 4)
    if width == 128 or tile_bytes <= 2 * limits.l2_for_rows:
        return SpmmLaunch(4, 4, 128, 4, 2)
    return SpmmLaunch(8, 8, 256, 2, 4)


def spmm_triton(
    x: Tensor,
    weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    csr: PackedCSR,
    launch: SpmmLaunch | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Launch the kernels over ``x [..., M, F]``; leading dimensions become tasks.

    ``out [T, N, F]``, of the type of ``x`` or the one that sums are kept in: written to, or added to if ``add``. Rows
    that are not in the work list are left as they are.
    """
    work = csr.work
    assert work is not None
    lead, (num_cols, num_features) = x.shape[:-2], x.shape[-2:]
    x_TMF = x.reshape(lead.numel(), num_cols, num_features).contiguous()
    tasks = x_TMF.shape[0]
    out_TNF = x.new_empty(tasks, csr.num_rows, num_features) if out is None else out
    if out_TNF.numel() == 0:
        return out_TNF.reshape(*lead, csr.num_rows, num_features)
    degree = csr.num_edges / max(csr.num_rows, 1)
    launch = launch or choose_launch(num_cols, num_features, x.element_size(), degree, limits_of(x.device))
    acc = triton_acc(x.dtype)
    num_partial = work.hub_of_partial.numel()
    partial = x.new_empty(tasks, max(num_partial, 1), num_features, dtype=accumulate_dtype(x.dtype))
    per_task_weight = weight is not None and weight.dim() > 1
    if weight is not None:
        weight = (weight.expand(*lead, csr.num_edges) if per_task_weight else weight).contiguous()
    num_heavy, num_light = work.heavy_row.numel(), work.light_row.numel()
    feature_tiles = -(-num_features // launch.block_features)
    grid = (num_heavy + -(-num_light // launch.block_rows), feature_tiles, tasks)
    _spmm_kernel[grid](
        x_TMF, weight if weight is not None else x_TMF,
        row_scale if row_scale is not None else x_TMF, col_scale if col_scale is not None else x_TMF,
        csr.indices, work.heavy_start, work.heavy_len, work.heavy_row,
        work.light_start, work.light_len, work.light_row, out_TNF, partial,
        num_heavy, num_light, num_partial, num_cols, csr.num_rows, csr.num_edges if per_task_weight else 0,
        F=num_features, HAS_W=weight is not None, HAS_RS=row_scale is not None, HAS_CS=col_scale is not None, ACC=acc,
        BR=launch.block_rows, BE=launch.block_edges, BF=launch.block_features, UNROLL=launch.unroll,
        ADD=add, num_warps=launch.num_warps,
    )  # fmt: skip
    if num_partial:
        add_hub_parts(partial, work, out_TNF, csr.num_rows, row_scale, add, launch.block_features)
    return out_TNF.reshape(*lead, csr.num_rows, num_features)


def spmm_torch(
    x: Tensor, weight: Tensor | None, row_scale: Tensor | None, col_scale: Tensor | None, csr: PackedCSR
) -> Tensor:
    """Reference: gather every edge's row, scale it, add it to its destination."""
    cols = csr.indices.long()
    messages = x.index_select(-2, cols).to(accumulate_dtype(x.dtype))
    if col_scale is not None:
        messages = messages * col_scale[cols][:, None]
    messages = messages if weight is None else messages * weight[..., None]
    out = messages.new_zeros(*x.shape[:-2], csr.num_rows, x.shape[-1])
    out = out.index_add(-2, csr.rows(), messages)
    return (out if row_scale is None else out * row_scale[:, None]).to(x.dtype)


@custom_op(
    "weft::spmm",
    "(Tensor x, Tensor? weight, Tensor? row_scale, Tensor? col_scale, Tensor[] csr, Tensor[] back,"
    " Tensor? weight_back) -> Tensor",
)
def _spmm_op(x, weight, row_scale, col_scale, csr, back, weight_back):
    serve = spmm_triton if use_triton(x) else cpu.spmm if cpu.serves(x, weight) else spmm_torch
    return serve(x, weight, row_scale, col_scale, unpack_csr(csr))


@_spmm_op.register_fake
def _spmm_fake(x, weight, row_scale, col_scale, csr, back, weight_back):
    return x.new_empty(*x.shape[:-2], csr[0].shape[0] - 1, x.shape[-1])


def _spmm_setup(ctx, inputs, output):
    x, weight, row_scale, col_scale, csr, back, weight_back = inputs
    ctx.csr, ctx.back, ctx.wants_weight = csr, back, ctx.needs_input_grad[1]
    ctx.save_for_backward(x if ctx.wants_weight else None, weight, row_scale, col_scale, weight_back)


def _spmm_backward(ctx, grad):
    x, weight, row_scale, col_scale, weight_back = ctx.saved_tensors
    csr, back = ctx.csr, ctx.back
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        if weight is not None and weight_back is None:
            weight_back = weight.index_select(-1, unpack_csr(back).perm)
        grad_x = _spmm_op(grad, weight_back, col_scale, row_scale, back, csr, weight)
    if ctx.wants_weight:
        # d weight[e] = <row_scale[i] grad[i], col_scale[j] x[j]>, summed over tasks that share the weight
        scaled_grad = grad if row_scale is None else grad * row_scale[:, None].to(grad.dtype)
        scaled_x = x if col_scale is None else x * col_scale[:, None].to(x.dtype)
        dots = edge_dot(scaled_grad, scaled_x, 1, csr, back).squeeze(-1)
        grad_weight = dots.sum_to_size(weight.shape).to(weight.dtype)
    return grad_x, grad_weight, None, None, [None] * len(csr), [None] * len(back), None


_spmm_op.register_autograd(_spmm_backward, setup_context=_spmm_setup)


@_spmm_op.register_vmap
def _spmm_vmap(info, in_dims, x, weight, row_scale, col_scale, csr, back, weight_back):
    """T tasks over one graph are one call on ``[T, ..., M, F]``."""
    x_dim, weight_dim, weight_back_dim = in_dims[0], in_dims[1], in_dims[6]
    x = x.movedim(x_dim, 0) if x_dim is not None else x.expand(info.batch_size, *x.shape)
    if weight_dim is not None:
        weight = _under_tasks(weight.movedim(weight_dim, 0), x)
    if weight_back_dim is not None:
        weight_back = _under_tasks(weight_back.movedim(weight_back_dim, 0), x)
    return _spmm_op(x, weight, row_scale, col_scale, csr, back, weight_back), 0


def _under_tasks(weight: Tensor, x: Tensor) -> Tensor:
    """``weight [T, E]`` as ``[T, 1, ..., E]``: inner tasks of ``x [T, ..., M, F]`` share it."""
    shared = (1,) * (x.dim() - 1 - weight.dim())
    return weight.reshape(weight.shape[0], *shared, *weight.shape[1:])


@supplied_by_adjacency
def spmm(adj: Adjacency, x: Tensor, weight: Tensor | None = None, reduce: str = "sum") -> Tensor:
    """Aggregate the rows of ``x [..., M, F]`` over the in-edges of every row: ``[..., N, F]``.

    ``weight [E]`` (or ``[..., E]``, one set per task) multiplies the edges; it defaults to ``adj.weight`` and
    is differentiable. ``reduce`` is ``"sum"``, ``"mean"`` (the sum divided by the degree) or ``"max"``.
    Rows without edges give zeros.
    """
    if x.shape[-2] != adj.num_cols:
        raise InputError(f"spmm: x has {x.shape[-2]} rows, the adjacency has {adj.num_cols} columns; they must agree")
    if reduce == "max":
        from weft.ops.sparse.spmm_max import spmm_max

        return spmm_max(adj, x)
    if reduce == "mean":
        adj = adj.mean()
    elif reduce != "sum":
        raise InputError(f"spmm: reduce={reduce!r} must be 'sum', 'mean' or 'max'")
    # Fixed weights are transposed once; learned ones need the transpose's order of edges.
    back = pack_csr_backward(adj, perm=weight is not None)
    weight_back = adj.transposed().weight if weight is None and back else None
    weight = adj.weight if weight is None else weight
    needs_rows = torch.is_grad_enabled() and weight is not None and weight.requires_grad
    csr = pack_csr(adj, rows=needs_rows)
    return _spmm_op(x, weight, adj.row_scale, adj.col_scale, csr, back, weight_back)
