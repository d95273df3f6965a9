"""Copy remote rows to a staging area, by few programs, so that the sums beside them have the rest of the GPU.

Shapes: T tasks, h remote rows, F features, G peers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.ops.launch.backend import have_triton, next_power_of_2
from weft.ops.launch.triton_lang import cdiv, jit_any_size, tl

COPY_TILE = 4096  # words of remote rows that a copying program keeps in flight
COPY_PROGRAMS = 264  # that copy at once: few, since a link needs a few MB in flight, and sums need the rest of the GPU
WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8} if have_triton() else dict[int, Any]()


@jit_any_size("first", "last", "num_halo")
def _copy_rows_kernel(
    table, counts, halo_owner, halo_row, staging, first, last, num_halo,
    WORD: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Remote rows ``first`` to ``last`` of one task to ``staging``, ROWS at a time; PROGRAMS take turns."""
    task = tl.program_id(1).to(tl.int64)
    staging += task * num_halo * WORDS
    for tile in range(tl.program_id(0), tl.cdiv(last - first, ROWS), PROGRAMS):
        place = first + tile * ROWS + tl.arange(0, ROWS)
        there = place < last
        owner = tl.load(halo_owner + place, mask=there, other=0)
        row = tl.load(halo_row + place, mask=there, other=0).to(tl.int64)
        base = tl.load(table + owner, mask=there, other=0)
        row += task * tl.load(counts + owner, mask=there, other=0)
        address = base.to(tl.pointer_type(WORD), bitcast=True)
        for begin in tl.static_range(0, WORDS, BLOCK):
            word = begin + tl.arange(0, BLOCK)
            mask = there[:, None] & (word < WORDS)[None, :]
            value = tl.load(address[:, None] + row[:, None] * WORDS + word[None, :], mask=mask, other=0)
            tl.store(staging + place.to(tl.int64)[:, None] * WORDS + word[None, :], value, mask=mask)


def copy_rows_triton(
    staging: Tensor, table: Tensor, counts: Tensor, owner: Tensor, row: Tensor, first: int, last: int
) -> None:
    """Rows ``first`` to ``last`` of ``(owner [h], row [h])`` to the same places of ``staging [T, h, F]``.

    ``table [G]`` and ``counts [G]``: addresses and rows of the peers (:func:`weft.ops.sharded.shard.address_table`).
    """
    if first >= last:
        return
    tasks, num_halo, features = staging.shape
    row_bytes = features * staging.element_size()
    size = next(size for size in WORDS if row_bytes % size == 0)
    words = row_bytes // size
    block = min(next_power_of_2(words), 512)
    rows = max(1, COPY_TILE // block)
    programs = min(COPY_PROGRAMS, cdiv(last - first, rows))
    _copy_rows_kernel[programs, tasks](
        table, counts, owner, row, staging.view(WORD_TYPES[size]), first, last, num_halo,
        WORD=WORDS[size], WORDS=words, ROWS=rows, BLOCK=block, PROGRAMS=programs, num_warps=4,
    )  # fmt: skip


@cache
def copying_stream(index: int) -> torch.cuda.Stream:
    """One per device; its few programs go before those that wait for a place on the device."""
    return torch.cuda.Stream(index, priority=-1)
