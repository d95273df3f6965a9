"""Gather rows on the GPU, from device memory or directly from pinned host memory (UVA).

Over PCIe a read takes about a microsecond, so the bandwidth comes from the number of reads in flight. Rows are moved as
words of up to 16 bytes (the widest that divides the row and its address), a program moves a tile of ``[rows, words]``
with all its loads independent, and there are enough programs for several MB in flight. The row's
stride is a constant of the kernel: Triton then knows which loads are aligned to 16 bytes.

Shapes: N rows, F features, M ids, W words per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.ops.sampling.gather_rows import check_gather

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class GatherLaunch:
    """Rows of a tile, words of a tile and warps."""

    block_rows: int
    block_words: int
    num_warps: int = 4


def choose_gather_launch(words: int, tile: int = 4096) -> GatherLaunch:
    """Tiles of ``tile`` words: 32 per thread, so that every thread has several wide loads in flight."""
    width = min(next_power_of_2(words), 1024)
    return GatherLaunch(max(1, tile // width), width)


@jit_any_size("count", "num_ids")
def _gather_kernel(
    out, table, ids, count, num_ids, STEP: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = place < (tl.minimum(tl.load(count).to(tl.int32), num_ids) if COUNTED else num_ids)
    row = tl.load(ids + place, mask=there, other=0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = there[:, None] & (word < WORDS)[None, :]
    # Every row is read once: keep it out of the way of what the caches hold.
    value = tl.load(table + row[:, None] * STEP + word[None, :], mask=mask, eviction_policy="evict_first")
    tl.store(out + place.to(tl.int64)[:, None] * WORDS + word[None, :], value, mask=mask)


@jit_any_size("num_ids")
def _gather_cached_kernel(
    out, table, cache, slots, ids, hits, num_ids, STEP: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows from ``cache`` where ``slots`` has a place for them, else from ``table``."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = place < num_ids
    row = tl.load(ids + place, mask=there, other=0).to(tl.int64)
    slot = tl.load(slots + row, mask=there, other=-1).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = there[:, None] & (word < WORDS)[None, :]
    hit = (slot >= 0)[:, None]
    far = tl.load(table + row[:, None] * STEP + word[None, :], mask=mask & (slot < 0)[:, None], other=0)
    near = tl.load(cache + slot[:, None] * WORDS + word[None, :], mask=mask & hit, other=0)
    tl.store(out + place.to(tl.int64)[:, None] * WORDS + word[None, :], tl.where(hit, near, far), mask=mask)
    if tl.program_id(1) == 0:
        tl.atomic_add(hits, tl.sum((slot >= 0).to(tl.int64), 0), sem="relaxed")


def _word(x: Tensor) -> torch.dtype:
    """The widest integer type that divides the rows of ``x`` and where they begin."""
    size = x.element_size()
    parts = (x.shape[1] * size, x.stride(0) * size, x.data_ptr() if x.device.type != "meta" else 0)
    return WORDS[next(width for width in WORDS if all(part % width == 0 for part in parts))]


def gather_rows_triton(
    x: Tensor,
    ids: Tensor,
    out: Tensor | None = None,
    *,
    count: Tensor | None = None,
    launch: GatherLaunch | None = None,
) -> Tensor:
    """The rows ``ids [M]`` of ``x [N, F]``, which lies on the device of ``ids`` or in pinned host memory.

    ``count [1]`` on the device: only the first so many ids exist, rows beyond are not written.
    """
    check_gather(x, out, ids.numel())
    if ids.is_cuda and not x.is_cuda and not x.is_pinned():
        raise InputError("x must lie on the GPU or in pinned host memory to be gathered there; call x.pin_memory()")
    out = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=ids.device) if out is None else out
    if out.numel() == 0:
        return out
    word = _word(x)
    table, target = x.view(word), out.view(word)
    words = target.shape[1]
    launch = launch or choose_gather_launch(words)
    grid = (triton.cdiv(ids.numel(), launch.block_rows), triton.cdiv(words, launch.block_words))
    _gather_kernel[grid](
        target, table, ids, ids if count is None else count, ids.numel(), table.stride(0),
        words, launch.block_rows, launch.block_words, count is not None, num_warps=launch.num_warps,
    )  # fmt: skip
    return out


def gather_cached_triton(
    x: Tensor, cache: Tensor, slots: Tensor, ids: Tensor, hits: Tensor, *, launch: GatherLaunch | None = None
) -> Tensor:
    """The rows ``ids [M]`` of ``x [N, F]`` (pinned host memory), read from ``cache [R, F]`` on the device if it has them.

    ``slots [N]`` int32 holds the row of each node in the cache or -1; ``hits [1]`` int64 on the device is increased by
    the number of rows that it had.
    """
    check_gather(x, None, ids.numel())
    out = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=ids.device)
    if out.numel() == 0:
        return out
    word = _word(x)
    table, near, target = x.view(word), cache.view(word), out.view(word)
    words = target.shape[1]
    launch = launch or choose_gather_launch(words)
    grid = (triton.cdiv(ids.numel(), launch.block_rows), triton.cdiv(words, launch.block_words))
    _gather_cached_kernel[grid](
        target, table, near, slots, ids, hits, ids.numel(), table.stride(0), words, launch.block_rows,
        launch.block_words, num_warps=launch.num_warps,
    )  # fmt: skip
    return out
