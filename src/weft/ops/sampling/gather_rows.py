"""Gather rows of a feature matrix by node id: on the device, from pinned host memory, or on the CPU.

Shapes: N rows, F features, M ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.cpu import run_shares
from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.ops.sampling.cpu import kernels

BYTES_OF_A_SHARE = 1 << 18


def gather_rows_torch(x: Tensor, ids: Tensor) -> Tensor:
    """``x[ids]``: the rows ``[M, F]`` of ``x [N, F]``."""
    return x[ids.long()]


def check_gather(x: Tensor, out: Tensor | None, count: int) -> None:
    """Raise an InputError if ``x`` is not a matrix with contiguous rows, or ``out`` does not fit."""
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise InputError(f"rows are gathered from a matrix with contiguous rows, not {list(x.shape)} {x.stride()}")
    if out is not None and (out.shape != (count, x.shape[1]) or out.dtype != x.dtype or not out.is_contiguous()):
        raise InputError(f"out must be contiguous {x.dtype} [{count}, {x.shape[1]}], not {out.dtype} {list(out.shape)}")


def gather_rows_cpu(x: Tensor, ids: Tensor, out: Tensor | None = None, shares: int | None = None) -> Tensor:
    """The rows ``ids [M]`` (int32 or int64) of ``x [N, F]`` on the CPU, on as many threads as torch uses.

    ``x`` may be a mapped file, ``out`` pinned memory. Ids are not checked. ``shares=1`` stays in the calling thread.
    """
    check_gather(x, out, ids.numel())
    out = x.new_empty(ids.numel(), x.shape[1]) if out is None else out
    ids, size = ids.contiguous(), x.element_size()
    row_bytes = x.shape[1] * size
    if out.numel():
        like = torch.empty(1, dtype=ids.dtype).numpy()
        shares = shares or max(1, min(64, out.numel() * size // BYTES_OF_A_SHARE))
        arguments = (out.data_ptr(), x.data_ptr(), row_bytes, x.stride(0) * size, ids.data_ptr(), like, ids.numel())
        run_shares(kernels().gather_share, arguments, shares)
    return out


def absent_cpu(ids: Tensor, held: Tensor, positions: Tensor) -> Tensor:
    """Those of ``ids [M]`` int32 for which ``held [N]`` bool is False, ``[R]``; writes ``positions`` int32 of them."""
    absent = torch.empty_like(ids)
    addresses = (held.data_ptr(), positions.data_ptr(), absent.data_ptr())
    return absent[: kernels().absent(ids.data_ptr(), ids.numel(), *addresses)]


# ---- Gather rows on the GPU, from device memory or directly from pinned host memory (UVA)
#
# Over PCIe a read takes about a microsecond, so the bandwidth comes from the number of reads in flight. Rows are
# moved as words of up to 16 bytes (the widest that divides the row and its address), a program moves a tile of
# ``[rows, words]`` with all its loads independent, and there are enough programs for several MB in flight. The row's
# stride is a constant of the kernel: Triton then knows which loads are aligned to 16 bytes.

LINE_BYTES = 128
FEW_PROGRAMS = 96  # programs of a gather over PCIe during other work: 32 KiB in flight each, on a part of the device
CLEARING = 128  # programs that clear rows: a few per cent of the rows of a batch
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class GatherLaunch:
    """Rows of a tile, words of a tile, warps, and whether loads begin at cache lines.

    ``aligned`` shifts the words of each row so that groups of threads read whole 128-byte lines of the table: a request
    over PCIe is then a line and not parts of two. ``programs``: how many share the tiles (0: one per tile).
    """

    block_rows: int
    block_words: int
    num_warps: int = 4
    aligned: bool = False
    programs: int = 0


def choose_gather_launch(
    words: int, word_bytes: int, pinned: bool, tile: int = 4096, concurrent: bool = False
) -> GatherLaunch:
    """Tiles of ``tile`` words: 32 per thread, so that every thread has several wide loads in flight.

    ``concurrent``: other kernels run at the same time; :data:`FEW_PROGRAMS` programs keep PCIe busy.
    """
    line = LINE_BYTES // word_bytes
    aligned = pinned and words >= line and words + line - 1 <= 1024
    width = min(next_power_of_2(words + (line - 1 if aligned else 0)), 1024)
    programs = FEW_PROGRAMS if pinned and concurrent else 0
    return GatherLaunch(max(1, tile // width), width, aligned=aligned, programs=programs)


@jit_any_size("count", "num_ids", "base")
def _gather_kernel(
    out, table, ids, count, num_ids, base, cache, slots, hits, STEP: tl.constexpr, WORDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr, COUNTED: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """``base`` is where the table begins in its cache line, in words; LINE = 0 leaves rows where they are.

    CACHED reads a row from ``cache`` if ``slots`` has a place for it there, and counts it in ``hits``. Programs take
    tiles in turn, so that a few of them, which leave the device to others, can do all the work.
    """
    last = tl.minimum(tl.load(count).to(tl.int32), num_ids) if COUNTED else num_ids
    for first in range(tl.program_id(0) * ROWS, last, tl.num_programs(0) * ROWS):
        place = first + tl.arange(0, ROWS)
        there = place < last
        row = tl.load(ids + place, mask=there, other=0).to(tl.int64)
        word = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
        if LINE > 0:
            word -= ((row * STEP + base) & (LINE - 1)).to(tl.int32)[:, None]
            mask = there[:, None] & (word >= 0) & (word < WORDS)
        else:
            mask = there[:, None] & (word < WORDS)
        far = mask
        if CACHED:
            slot = tl.load(slots + row, mask=there, other=-1).to(tl.int64)
            hit = (slot >= 0)[:, None]
            far = mask & (slot < 0)[:, None]
            near = tl.load(cache + slot[:, None] * WORDS + word, mask=mask & hit, other=0)
            if tl.program_id(1) == 0:
                tl.atomic_add(hits, tl.sum((slot >= 0).to(tl.int64), 0), sem="relaxed")
        # Every row is read once: keep it out of the way of what the caches hold.
        value = tl.load(table + row[:, None] * STEP + word, mask=far, other=0, eviction_policy="evict_first")
        if CACHED:
            value = tl.where(hit, near, value)
        tl.store(out + place.to(tl.int64)[:, None] * WORDS + word, value, mask=mask)


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
    cached: tuple[Tensor, Tensor, Tensor] | None = None,
    launch: GatherLaunch | None = None,
    concurrent: bool = False,
) -> Tensor:
    """The rows ``ids [M]`` of ``x [N, F]``, which lies on the device of ``ids`` or in pinned host memory.

    ``count [1]`` on the device: how many ids exist; rows beyond stay unwritten. ``cached``: ``(cache [R, F], slots [N],
    hits [1])`` on the device. Rows that the cache has are read there: ``slots`` int32 holds the row of each node in the
    cache or -1, and ``hits`` int64 is increased by the number of rows that it had. ``concurrent``: other work runs on
    the device at the same time.
    """
    check_gather(x, out, ids.numel())
    if ids.is_cuda and not x.is_cuda and not x.is_pinned():
        raise InputError("x must lie on the GPU or in pinned host memory to be gathered there; call x.pin_memory()")
    out = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=ids.device) if out is None else out
    if out.numel() == 0:
        return out
    word = _word(x)
    table, target, words = x.view(word), out.view(word), out.shape[1] * out.element_size() // word.itemsize
    launch = launch or choose_gather_launch(words, word.itemsize, pinned=not x.is_cuda, concurrent=concurrent)
    line, base = (LINE_BYTES if launch.aligned else 0) // word.itemsize, x.data_ptr() % LINE_BYTES // word.itemsize
    cache, slots, hits = (target, ids, ids) if cached is None else (cached[0].view(word), *cached[1:])
    width = words + max(line - 1, 0)
    tiles = triton.cdiv(ids.numel(), launch.block_rows)
    grid = (min(tiles, launch.programs or tiles), triton.cdiv(width, launch.block_words))
    _gather_kernel[grid](
        target, table, ids, ids if count is None else count, ids.numel(), base, cache, slots, hits, table.stride(0),
        words, launch.block_rows, launch.block_words, line, count is not None, cached is not None,
        num_warps=launch.num_warps,
    )  # fmt: skip
    return out


@jit_any_size("count", "filled", "num_rows")
def _clear_kernel(out, count, filled, num_rows, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.load(count).to(tl.int64) * WORDS
    last = tl.minimum(tl.load(filled), num_rows).to(tl.int64) * WORDS
    for at in range(first + tl.program_id(0) * BLOCK, last, tl.num_programs(0) * BLOCK):
        word = at + tl.arange(0, BLOCK)
        tl.store(out + word, tl.zeros([BLOCK], out.dtype.element_ty), mask=word < last)


@jit_any_size("count", "filled", "num_rows")
def _settle_kernel(count, filled, num_rows):
    """Rows behind ``out`` were not cleared: a buffer stays filled up to them."""
    before = tl.load(filled)
    tl.store(filled, tl.where(before <= num_rows, tl.load(count).to(tl.int32), before))


def clear_rows_triton(out: Tensor, count: Tensor, filled: Tensor) -> None:
    """Zero the rows of ``out [M, F]`` from ``count [1]`` on that a former batch has filled; nothing is read back.

    ``out`` is the first rows of a buffer of which those from ``filled [1]`` int32 on are zeros; ``filled`` is updated.
    """
    if out.numel() == 0:
        return
    word = _word(out)
    words, target = out.shape[1] * out.element_size() // word.itemsize, out.view(word)
    _clear_kernel[(CLEARING,)](target, count, filled, out.shape[0], WORDS=words, BLOCK=1024, num_warps=4)
    _settle_kernel[(1,)](count, filled, out.shape[0], num_warps=1)
