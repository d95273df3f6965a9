"""Kernel for merged launches: rows pushed along their edges; see ``launchers.py``."""

from __future__ import annotations

from torch import Tensor

from weft.ops.csr.packed import PackedCSR
from weft.ops.launch.backend import accumulate_dtype, limits_of
from weft.ops.launch.triton_lang import flatten_tasks, tl, triton, triton_acc
from weft.ops.sparse.spmm import choose_launch


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
