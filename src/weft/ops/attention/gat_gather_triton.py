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

from torch import Tensor

from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist_triton import heavy_owner
from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import tl, triton


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
