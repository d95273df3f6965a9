"""TurboGNN's sampler: results of high-degree rows staged on chip, rows sorted by degree and dealt out interleaved.

Algorithm 2 sorts the rows by descending degree, splits them at a degree threshold and runs two kernels: rows at or
above the threshold with their results in shared memory (Algorithm 1), the others with results in global memory. In a
partition with few rows these go to the warps in an interleaved order (1 .. m, then m .. 1); in a large one every block
takes consecutive rows and interleaves them among its warps.

What differs from the paper: Triton has no atomics on shared memory, so the staged result of a row is a tensor in
registers and a chunk of edges claims its slots by a maximum over a ``[K, edges]`` comparison, made only if any edge
of the chunk claims one. A program is one warp, so "block" means a group of consecutive programs. Both kernels are
launched for all rows, because the size of the partition stays on the device; programs outside theirs end at once. They
run one after the other on the current stream instead of on two streams. Picks are the reservoir's, bit for bit.

Shapes: N nodes, E edges, S rows, K fan-out, P = S * K slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.ops.sampling.reference import HopSample, check_fanout, check_slots
from weft.ops.sampling.reservoir_triton import reservoir_in_global_memory, room_for_picks, row_bounds
from weft.ops.sampling.sample_triton import draw_below, hop_key, node_streams


@dataclass(frozen=True)
class PaperLaunch:
    """The paper's parameters.

    ``degree_threshold``: from this degree on results are staged on chip; ``block_threshold``: partitions below this
    many rows are interleaved over all programs; ``warps_per_block`` and ``rows_per_program`` shape the groups.
    """

    degree_threshold: int = 128
    block_threshold: int = 8192
    warps_per_block: int = 4
    rows_per_program: int = 4
    block_edges: int = 128
    block_edges_low: int = 64


@triton.jit
def staged_row(
    key, node, start, degree, begin, indices, sources, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: slots live in registers and are written once."""
    slot = tl.arange(0, KP)
    chosen = slot
    stream = node_streams(key, node)
    for first in range(K, degree, BLOCK):
        neighbour = first + tl.arange(0, BLOCK)
        draw = draw_below(stream, neighbour, neighbour + 1)
        draw = tl.where(neighbour < degree, draw, K)
        if tl.min(draw, 0) < K:
            claims = tl.where(slot[:, None] == draw[None, :], neighbour[None, :], 0)
            chosen = tl.maximum(chosen, tl.max(claims, 1))
    filled = slot < tl.minimum(degree, K)
    tl.store(sources + begin + slot, tl.load(indices + start + chosen, mask=filled, other=0), mask=filled)


@jit_any_size("num_rows", "num_high", "hop", "few")
def _partition_kernel(
    indptr, indices, rows, order, num_rows, num_high, clock, hop, out_indptr, sources, few,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, TASKS: tl.constexpr, WARPS: tl.constexpr,
    HIGH: tl.constexpr,
):  # fmt: skip
    """All rows of one partition; HIGH rows come first in ``order``."""
    high = tl.load(num_high)
    base = 0 if HIGH else high
    size = high if HIGH else num_rows - high
    program = tl.program_id(0)
    # In a small partition all needed programs form one group; else WARPS of them do.
    group = tl.where(size < few, tl.maximum(tl.cdiv(size, TASKS), 1), WARPS)
    first, warp = program // group * (group * TASKS), program % group
    key = hop_key(clock, hop)
    for task in range(TASKS):
        place = first + task * group + tl.where(task % 2 == 0, warp, group - 1 - warp)
        if place < size:
            row = tl.load(order + base + place)
            node, start, degree = row_bounds(indptr, rows, row, place < size)
            begin = tl.load(out_indptr + row)
            if HIGH:
                staged_row(key, node, start, degree, begin, indices, sources, K, KP, BLOCK)
            else:
                reservoir_in_global_memory(
                    key, node, start, degree, begin, indices, sources, sources, K, KP, BLOCK, False
                )  # fmt: skip


def sort_by_degree(indptr: Tensor, seeds: Tensor, threshold: int) -> tuple[Tensor, Tensor]:
    """``(order [S], num_high [1])``: rows by descending degree, and how many reach the threshold."""
    row = seeds.long()
    degree = indptr[row + 1] - indptr[row]
    ordered, order = torch.sort(degree.to(torch.int32), descending=True, stable=True)
    return order, (ordered >= threshold).sum(dtype=torch.int32).reshape(1)


def sample_paper_triton(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanout: int,
    clock: Tensor,
    hop: int = 0,
    *,
    launch: PaperLaunch | None = None,
) -> HopSample:
    """Sample ``min(fanout, degree)`` in-neighbours of ``seeds [S]`` int32; sizes stay on the device."""
    out_indptr, sources = room_for_picks(indptr, seeds, fanout)
    launch, count = launch or PaperLaunch(), seeds.numel()
    if count:
        order, num_high = sort_by_degree(indptr, seeds, launch.degree_threshold)
        group = launch.rows_per_program * launch.warps_per_block
        grid = (triton.cdiv(count, group) * launch.warps_per_block,)
        for high, block in ((True, launch.block_edges), (False, launch.block_edges_low)):
            _partition_kernel[grid](
                indptr, indices, seeds, order, count, num_high, clock, hop, out_indptr, sources, launch.block_threshold,
                fanout, next_power_of_2(fanout), block, launch.rows_per_program, launch.warps_per_block, high,
                num_warps=1,
            )  # fmt: skip
    return HopSample(out_indptr, sources)


# ---- Rows of a batch in descending order of their degree class, by a counting sort of two passes
#
# Class c holds the degrees whose highest bit is bit 30 - c; degree 0 is the last class. The order inside of a class
# is not fixed: programs take their places with atomics. A sampler that writes every row where its CSR has it gives
# the same result in any order.

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


# ---- TurboGNN's sampler with the work divided otherwise: rows ordered by degree class instead of sorted by degree, and
# one thread for each row below the threshold
#
# A thread keeps the slots of its row in registers and draws for the row's edges in ascending order, so a claim is a
# move and needs no atomics. Rows of one class are neighbours in a warp, so its threads end together. A row above the
# threshold belongs to a block of warps. Both run in one launch, the rows of high degree first. Picks are the
# reservoir's, bit for bit.


@dataclass(frozen=True)
class ThreadsLaunch:
    """``degree_threshold`` (a power of two): rows from here on have a block of their own, at most ``high_programs`` at
    a time; ``num_warps`` per program."""

    degree_threshold: int = 256
    high_programs: int = 1056
    num_warps: int = 4


@triton.jit
def _rows_of_low_degree(
    key, indptr, indices, rows, order, first, num_rows, out_indptr, sources,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows at ``first .. first + BLOCK`` of the order, one per thread."""
    place = first + tl.arange(0, BLOCK)
    there = place < num_rows
    row = tl.load(order + place, mask=there, other=0)
    node, start, degree = row_bounds(indptr, rows, row, there)
    begin = tl.load(out_indptr + row, mask=there, other=0)
    stream = node_streams(key, node)
    slot = tl.arange(0, KP)[:, None]
    chosen = slot + tl.zeros([KP, BLOCK], tl.int32)
    for neighbour in range(K, tl.max(degree, 0)):
        number = tl.full([BLOCK], neighbour, tl.int32)
        draw = tl.where(neighbour < degree, draw_below(stream, number, number + 1), K)
        chosen = tl.where(slot == draw[None, :], neighbour, chosen)
    filled = there[None, :] & (slot < tl.minimum(degree, K)[None, :])
    source = tl.load(indices + start[None, :] + chosen, mask=filled, other=0)
    tl.store(sources + begin[None, :] + slot, source, mask=filled)


@jit_any_size("num_rows", "hop")
def _threads_kernel(
    indptr, indices, rows, order, num_rows, sizes, clock, hop, out_indptr, sources,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """The first HIGH programs take rows of the classes below LOW in turn, the others BLOCK rows of the rest each."""
    kind = tl.arange(0, 32)
    high = tl.sum(tl.where(kind < LOW, tl.load(sizes + kind), 0), 0)
    key = hop_key(clock, hop)
    program = tl.program_id(0)
    if program < HIGH:
        for place in range(program, high, HIGH):
            row = tl.load(order + place)
            node, start, degree = row_bounds(indptr, rows, row, place < high)
            begin = tl.load(out_indptr + row)
            staged_row(key, node, start, degree, begin, indices, sources, K, KP, EDGES)
    else:
        first = high + (program - HIGH) * BLOCK
        if first < num_rows:
            _rows_of_low_degree(key, indptr, indices, rows, order, first, num_rows, out_indptr, sources, K, KP, BLOCK)


def sample_threads_triton(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanout: int,
    clock: Tensor,
    hop: int = 0,
    *,
    launch: ThreadsLaunch | None = None,
) -> HopSample:
    """Sample ``min(fanout, degree)`` in-neighbours of ``seeds [S]`` int32; sizes stay on the device."""
    if seeds.numel() == 0:
        return sample_paper_triton(indptr, indices, seeds, fanout, clock, hop)
    check_fanout(fanout)
    check_slots(seeds.numel(), fanout)
    launch, width = launch or ThreadsLaunch(), next_power_of_2(fanout)
    sources = torch.empty(seeds.numel() * fanout, dtype=torch.int32, device=seeds.device)
    out_indptr, order, sizes = order_by_class(indptr, seeds, fanout)
    threads, high = 32 * launch.num_warps, min(launch.high_programs, seeds.numel())
    _threads_kernel[(high + triton.cdiv(seeds.numel(), threads),)](
        indptr, indices, seeds, order, seeds.numel(), sizes, clock, hop, out_indptr, sources,
        fanout, width, threads, max(threads, 8192 // width), high, first_low_class(launch.degree_threshold),
        num_warps=launch.num_warps,
    )  # fmt: skip
    return HopSample(out_indptr, sources)
