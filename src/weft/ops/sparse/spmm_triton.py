"""Triton kernels of ``spmm.py``: bounded work items, partial sums for hubs, no atomics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist_triton import heavy_piece, light_rows
from weft.ops.launch.backend import H200, DeviceLimits, accumulate_dtype, limits_of, next_power_of_2
from weft.ops.launch.triton_lang import tl, triton, triton_acc


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
        at, there = out + row[:, None] * F + f[None, :], valid[:, None] & in_f[None, :]
        if ADD:
            total += tl.load(at, mask=there, other=0.0).to(ACC)
        tl.store(at, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _add_partials_kernel(
    partial, hub_ptr, hub_row, row_scale, out, num_partial, N,
    F: tl.constexpr, HAS_RS: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BF: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Add the partial rows of one hub, BP at a time and always in the same order; ADD: onto what is in ``out``."""
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
        at = partial + (task * num_partial + slot)[:, None] * F + f[None, :]
        total += tl.load(at, mask=(slot < last)[:, None] & in_f[None, :], other=0.0)
    sum_f = tl.sum(total, 0)
    if HAS_RS:
        sum_f *= tl.load(row_scale + row).to(ACC)
    if ADD:
        sum_f += tl.load(out + (task * N + row) * F + f, mask=in_f, other=0.0).to(ACC)
    tl.store(out + (task * N + row) * F + f, sum_f.to(out.dtype.element_ty), mask=in_f)


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

    Tiles over features are processed one after another, so while ``num_cols * block_features`` fits the L2 each column is
    read from memory once. Measured on an H200 for F = 16, 64, 256, 1024 over pubmed, arxiv, reddit, products shapes.
    """
    width = next_power_of_2(num_features)
    if width <= 16:
        return SpmmLaunch(128, 128, width, 2, 4) if mean_degree > 64 else SpmmLaunch(32, 32, width, 4, 2)
    if width == 32:
        return SpmmLaunch(16, 16, 32, 4, 2)
    tile_bytes = num_cols * 64 * itemsize
    if width == 64:
        return _launch_64(tile_bytes, itemsize == 2, limits)
    if tile_bytes <= limits.l2_for_rows:
        return SpmmLaunch(8, 8, 128 if 2 * tile_bytes <= limits.l2_for_rows else 64, 4, 4)
    if width == 128 or tile_bytes <= 2 * limits.l2_for_rows:
        return SpmmLaunch(4, 4, 128, 4, 2)
    return SpmmLaunch(8, 8, 256, 2, 4)


def _launch_64(tile_bytes: int, half: bool, limits: DeviceLimits) -> SpmmLaunch:
    """Rows of 64 features, by whether all of them stay in an L1, in the L2, or in neither.

    Measured on an H200, per task of many: arxiv shape 0.089 ms with two warps against 0.094 with four, in half precision
    0.0535 with 16 rows against 0.0548 with 8; pubmed's features (500 columns) times weights 0.015 with one warp per four
    rows against 0.022.
    """
    if half:
        return SpmmLaunch(16, 16, 64, 4, 2) if tile_bytes <= limits.l2_for_rows else SpmmLaunch(8, 8, 64, 8, 2)
    if tile_bytes <= limits.l1_for_rows:
        return SpmmLaunch(4, 4, 64, 4, 1)
    return SpmmLaunch(8, 8, 64, 4, 2 if tile_bytes <= limits.l2_for_rows else 4)


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
        _add_partials_kernel[(work.hub_row.numel(), feature_tiles, tasks)](
            partial, work.hub_ptr, work.hub_row, row_scale if row_scale is not None else x_TMF, out_TNF,
            num_partial, csr.num_rows,
            F=num_features, HAS_RS=row_scale is not None, ACC=acc, BP=16, BF=launch.block_features, ADD=add,
            num_warps=4,
        )  # fmt: skip
    return out_TNF.reshape(*lead, csr.num_rows, num_features)
