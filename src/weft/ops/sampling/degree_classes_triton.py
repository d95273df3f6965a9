"""Rows of a batch in descending order of their degree class, by a counting sort of two passes.

Class c holds the degrees whose highest bit is bit 30 - c; degree 0 is the last class. The order inside of a class is
not fixed: programs take their places with atomics. A sampler that writes every row where its CSR has it gives the same
result in any order.

Shapes: N nodes, S rows, K fan-out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.ops.sampling.reservoir_triton import row_bounds

CLASSES = 32
BLOCK = 256


def first_low_class(threshold: int) -> int:
    """Classes below this one hold the degrees from ``threshold``, a power of two, on."""
    return CLASSES - threshold.bit_length()


@triton.jit
def _members(indptr, rows, num_rows, BLOCK: tl.constexpr):
    """``(row [BLOCK], degree [BLOCK], one-hot [BLOCK, 32])`` of this program's rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < num_rows
    _, _, degree = row_bounds(indptr, rows, row, there)
    kind = tl.full([BLOCK], 31, tl.int32)
    for power in tl.static_range(31):
        kind -= (degree >= (1 << power)).to(tl.int32)
    member = (kind[:, None] == tl.arange(0, 32)[None, :]) & there[:, None]
    return row, degree, member.to(tl.int32)


@jit_any_size("num_rows")
def _count_kernel(indptr, rows, num_rows, counts, sizes, K: tl.constexpr, BLOCK: tl.constexpr):
    """``counts[row + 1]``: picks of every row; ``sizes [32]``: rows of every class."""
    row, degree, member = _members(indptr, rows, num_rows, BLOCK)
    tl.store(counts + row + 1, tl.minimum(degree, K), mask=row < num_rows)
    tl.store(counts + row, 0, mask=row == 0)
    tl.atomic_add(sizes + tl.arange(0, 32), tl.sum(member, 0), sem="relaxed")


@jit_any_size("num_rows")
def _order_kernel(indptr, rows, num_rows, sizes, taken, order, BLOCK: tl.constexpr):
    """Every row at a place of its class; ``taken [32]`` counts places that earlier programs took."""
    row, _, member = _members(indptr, rows, num_rows, BLOCK)
    kind = tl.arange(0, 32)
    size = tl.load(sizes + kind)
    begin = tl.cumsum(size, 0) - size + tl.atomic_add(taken + kind, tl.sum(member, 0), sem="relaxed")
    place = tl.sum(member * (begin[None, :] + tl.cumsum(member, 0) - 1), 1)
    tl.store(order + place, row, mask=row < num_rows)


def order_by_class(indptr: Tensor, seeds: Tensor, fanout: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(out_indptr [S+1], order [S], sizes [32])`` int32 of ``seeds [S]`` int32, at least one."""
    count = seeds.numel()
    counts, order = (torch.empty(count + more, dtype=torch.int32, device=seeds.device) for more in (1, 0))
    sizes, taken = torch.zeros(2, CLASSES, dtype=torch.int32, device=seeds.device)
    grid = (triton.cdiv(count, BLOCK),)
    _count_kernel[grid](indptr, seeds, count, counts, sizes, fanout, BLOCK)
    _order_kernel[grid](indptr, seeds, count, sizes, taken, order, BLOCK)
    return counts.cumsum(0, dtype=torch.int32), order, sizes
