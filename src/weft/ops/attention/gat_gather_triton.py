"""What both directions of ``gat.py`` share in Triton: rows gathered along the edges, weighted by coefficients.

    acc[i]  = sum over e of |c[e, h]|        * v[j, h, :]
    plus[i] = sum over e of max(c[e, h], 0)  * v[j, h, :]        edges with a positive argument only

A coefficient costs as much for a head of 16 features as for one of 1, and every thread along the features needs it. So
a lane processes four edges at a time, and each edge's coefficient is computed by a different thread: tiles of
coefficients are ``[BR, BG, 2, 2]`` (lanes, heads, four edges), then split into four ``[BR, BG]`` and multiplied with
tiles of rows ``[BR, BG, BD]``. While four rows are being loaded, the coefficients of the next four edges are computed,
and the columns of the four edges after those are loaded.

A lane is a light row, or every BR-th edge of a heavy one. A head is never split: BD is its width, padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist import heavy_owner
from weft.ops.launch.backend import limits_of, next_power_of_2
from weft.ops.launch.triton_lang import tl, triton, triton_acc


@triton.jit
def leaky(argument, slope):
    """leaky_relu."""
    return tl.where(argument > 0, argument, argument * slope)


@triton.jit
def heads_of(tile, H: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr):
    """``(head [BG], place in a row [BG, BD], whether the head and the place exist)`` of the tile of heads ``tile``."""
    head = tile * BG + tl.arange(0, BG)
    d = tl.arange(0, BD)
    in_head = head < H
    if H % BG == 0:
        in_head = tl.full([BG], 1, tl.int1)
    return head, head[:, None] * D + d[None, :], in_head, in_head[:, None] & (d < D)[None, :]


@triton.jit
def lanes_of(
    piece, heavy_start, heavy_len, heavy_row, light_start, light_len, light_row, hub_row, hub_of_partial,
    num_heavy, num_light, num_partial, BR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``(first edge, edges, row, valid) [BR]`` of the lanes, and the step from one edge of a lane to its next."""
    OFFSET: tl.constexpr = tl.int64 if WIDE else tl.int32
    lane = tl.arange(0, BR)
    step = 1
    item = (piece - num_heavy) * BR + lane
    valid = (item < num_light) & (item >= 0)  # below 0 in a heavy item
    first = tl.load(light_start + item, mask=valid, other=0).to(OFFSET)
    count = tl.load(light_len + item, mask=valid, other=0)
    row = tl.load(light_row + item, mask=valid, other=0).to(tl.int64)
    if piece < num_heavy:
        first = tl.load(heavy_start + piece).to(OFFSET) + lane
        count = (tl.load(heavy_len + piece) - lane + BR - 1) // BR
        row = tl.zeros([BR], tl.int64) + heavy_owner(piece, heavy_row, hub_row, hub_of_partial, num_partial)
        valid = row >= 0
        step = BR
    return first, count, row, valid, step


@triton.jit
def four_edges(first, k, step, count):
    """Edges k .. k + 3 of every lane, ``[BR, 2, 2]``: their place, and whether they exist."""
    u = k + tl.arange(0, 2)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    return first[:, None, None] + u * step, u < count[:, None, None]


@triton.jit
def four_columns(indices, first, k, step, count):
    """The columns of edges k .. k + 3 of every lane, four times ``[BR]``."""
    edge = first + k * step
    col0 = tl.load(indices + edge, mask=k < count, other=0)
    col1 = tl.load(indices + edge + step, mask=k + 1 < count, other=0)
    col2 = tl.load(indices + edge + 2 * step, mask=k + 2 < count, other=0)
    col3 = tl.load(indices + edge + 3 * step, mask=k + 3 < count, other=0)
    return col0, col1, col2, col3


@triton.jit
def row_of(value, col, inside, at, in_tile, S_V: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr):
    """The rows of ``value`` in the columns ``[BR]``, as ``[BR, BG, BD]``."""
    place = col.to(tl.int64 if WIDE else tl.int32)[:, None, None] * S_V + at[None, :, :]
    return tl.load(value + place, mask=inside[:, None, None] & in_tile[None, :, :], other=0.0).to(ACC)


@triton.jit
def _weigh(value, c, acc, plus, PLUS: tl.constexpr):
    acc += tl.abs(c)[:, :, None] * value
    if PLUS:
        plus += tl.maximum(c, 0.0)[:, :, None] * value
    return acc, plus


@triton.jit
def weigh_four(c, value0, value1, value2, value3, acc, plus, PLUS: tl.constexpr):
    """Add four rows per lane, times its coefficients ``[BR, BG, 2, 2]``, to the sums ``[BR, BG, BD]``."""
    even, odd = tl.split(c)
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    acc, plus = _weigh(value0, c0, acc, plus, PLUS)
    acc, plus = _weigh(value1, c1, acc, plus, PLUS)
    acc, plus = _weigh(value2, c2, acc, plus, PLUS)
    acc, plus = _weigh(value3, c3, acc, plus, PLUS)
    return acc, plus


@triton.jit
def store_softmax(log_sum, alpha_plus, at, mask, top, total, positive):
    """A row's results from its denominator, and the inverse; for a row without edges 0, 0 and 1."""
    some = total != 0  # a NaN denominator stays NaN
    safe = tl.where(some, total, 1.0)
    tl.store(log_sum + at, tl.where(some, top + tl.log(safe), 0.0), mask=mask)
    tl.store(alpha_plus + at, positive / safe, mask=mask)
    return 1.0 / safe


@dataclass(frozen=True)
class GatherLaunch:
    """Launch parameters: lanes and heads of a tile, features of a head (padded), warps."""

    block_rows: int
    block_heads: int
    block_width: int
    num_warps: int = 1

    @property
    def hub_parts(self) -> int:
        """Chunks of a hub that are added per step."""
        return max(1, min(8, 1024 // (self.block_heads * self.block_width)))

    def grid(self, csr: PackedCSR, heads: int, tasks: int) -> tuple[int, int, int]:
        """The grid: work items, tiles of heads, tasks."""
        heavy, light = csr.work.heavy_row.numel(), csr.work.light_row.numel()
        return heavy + -(-light // self.block_rows), -(-heads // self.block_heads), tasks


def choose_gather_launch(heads: int, width: int, shared: bool = False) -> GatherLaunch:
    """One warp per two rows of 64 features.

    Measured on an H200 (arxiv shape, 4 heads of 16): forward 0.179 ms and backward 0.150 with two rows and a warp, 0.178
    and 0.159 with four and two, 0.182 and 0.168 with eight and two, 0.200 and 0.182 with eight and four. A gradient that all
    heads share is read once for as many of them as fit into a tile.
    """
    unit = next_power_of_2(width)
    block = min(next_power_of_2(heads), max(1, (256 if shared else 64) // unit))
    if heads % block and heads % (block // 2) == 0:
        block //= 2  # no head of a tile idle
    size = block * unit
    if shared:
        return GatherLaunch(2, block, unit, max(1, min(8, size // 128)))
    return GatherLaunch(max(2, min(8, 128 // size)), block, unit, max(1, min(8, size // 64)))


def work_items(csr: PackedCSR) -> tuple[Tensor, ...]:
    """The work list as :func:`lanes_of` takes it."""
    work = csr.work
    return (
        work.heavy_start, work.heavy_len, work.heavy_row, work.light_start, work.light_len, work.light_row,
        work.hub_row, work.hub_of_partial,
    )  # fmt: skip


def wide_offsets(*sizes: int) -> bool:
    """Whether offsets into tensors of ``sizes`` elements need 64 bits: with 32, a gather takes 0.155 instead of 0.162 ms."""
    return max(sizes) >= 1 << 31


# ---- Triton kernels of ``gat.py``: the highest and the lowest source score of every task and head
#
# With a slope in [0, 1] leaky_relu is monotonic, so ``leaky_relu(highest + a_dst[i])`` bounds every score of row i:
# the softmax's shift is known before any edge is read. A score is at most ``highest - lowest`` below it, which says
# whether its exponential still has full precision.

# float32's exponentials err by 1e-6 at a shift of 30 and by twice that at 60; rows of half precision are rounded more
# coarsely than that, and their coefficients are float32's.
SPREAD_LIMIT = {torch.float16: 60.0, torch.bfloat16: 60.0, torch.float32: 30.0, torch.float64: 60.0}


def spread_limit(dtype: torch.dtype, slope: float) -> float:
    """The largest spread of a head's source scores for which one bound serves all of its rows.

    Coefficients are then at least ``exp(-limit)``, far above the denormal range. With a slope outside of [0, 1]
    leaky_relu is not monotonic or widens the spread: no spread is small enough.
    """
    return SPREAD_LIMIT[dtype] if 0.0 <= slope <= 1.0 else -1.0


@triton.jit
def _extremes_kernel(
    a_src, part, M, rows_per_program,
    H: tl.constexpr, S_SRC: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The extremes of a run of rows, into ``part [2, T, P, H]``."""
    run = tl.program_id(0)
    task = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    first = run * rows_per_program
    last = tl.minimum(first + rows_per_program, M)
    highest = tl.full([BN, BH], float("-inf"), ACC)
    lowest = tl.full([BN, BH], float("inf"), ACC)
    for base in range(first, last, BN):
        n = base + tl.arange(0, BN)
        seen = (n < last)[:, None] & (h < H)[None, :]
        score = tl.load(a_src + (task * M + n)[:, None] * S_SRC + h[None, :], mask=seen, other=0.0).to(ACC)
        highest = tl.maximum(highest, tl.where(seen, score, float("-inf")))
        lowest = tl.minimum(lowest, tl.where(seen, score, float("inf")))
    at = (task * tl.num_programs(0) + run) * H + h
    size = tl.num_programs(2).to(tl.int64) * tl.num_programs(0) * H
    tl.store(part + at, tl.max(highest, 0), mask=h < H)
    tl.store(part + size + at, tl.min(lowest, 0), mask=h < H)


@triton.jit
def _bounds_kernel(part, bounds, runs, H: tl.constexpr, BP: tl.constexpr, BH: tl.constexpr):
    """The extremes of all runs, ``part [2, T, P, H]`` to ``bounds [T, 2, H]``."""
    task = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * BH + tl.arange(0, BH)
    run = tl.arange(0, BP)
    seen = (run < runs)[:, None] & (h < H)[None, :]
    at = (task * runs + run)[:, None] * H + h[None, :]
    size = tl.num_programs(1).to(tl.int64) * runs * H
    highest = tl.max(tl.load(part + at, mask=seen, other=float("-inf")), 0)
    lowest = tl.min(tl.load(part + size + at, mask=seen, other=float("inf")), 0)
    tl.store(bounds + task * 2 * H + h, highest, mask=h < H)
    tl.store(bounds + (task * 2 + 1) * H + h, lowest, mask=h < H)


def score_bounds(a_src: Tensor, spacing: int, like: Tensor, programs: int | None = None) -> Tensor:
    """``[T, 2, H]``, the highest and the lowest of ``a_src [..., M, H]`` over M, in the type of ``like``.

    Rows of ``a_src`` are ``spacing`` elements apart. About two programs per multiprocessor, whatever M is.
    """
    M, H = a_src.shape[-2:]
    tasks = a_src.shape[:-2].numel()
    block_h = min(8, next_power_of_2(H))
    block_n = 1024 // block_h
    programs = limits_of(a_src.device).programs(2) if programs is None else programs
    rows = max(block_n, -(-M // programs))
    runs = max(1, -(-M // rows))
    part, bounds = like.new_empty(2, tasks, runs, H), like.new_empty(tasks, 2, H)
    tiles = -(-H // block_h)
    _extremes_kernel[(runs, tiles, tasks)](
        a_src, part, M, rows, H=H, S_SRC=spacing, ACC=triton_acc(like.dtype), BN=block_n, BH=block_h, num_warps=4,
    )  # fmt: skip
    _bounds_kernel[(tiles, tasks)](part, bounds, runs, H=H, BP=next_power_of_2(runs), BH=block_h, num_warps=4)
    return bounds
