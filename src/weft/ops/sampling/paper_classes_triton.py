"""TurboGNN's sampler with rows ordered by degree class instead of sorted by degree.

Two samplers, both the reservoir's picks bit for bit:

- :func:`sample_classes_triton` is Algorithm 2 as in :mod:`weft.ops.sampling.paper_triton`; a counting sort by degree
  class (:mod:`weft.ops.sampling.degree_classes_triton`) takes the place of the sort.
- :func:`sample_threads_triton` also divides the work differently: a row below the threshold belongs to one thread, or to
  a few that take its edges in turn. Each keeps slots in registers and draws for its edges in ascending order, so a claim
  is a move and needs no atomics; the last claim of a slot is the maximum over the row's threads. Rows of one class are
  neighbours in a warp, so its threads end together. A row above the threshold belongs to a block of warps. Both run in
  one launch, the rows of high degree first.

Shapes: N nodes, E edges, S rows, K fan-out, P = S * K slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.ops.sampling.degree_classes_triton import first_low_class, order_by_class
from weft.ops.sampling.draws_triton import draw_below, hop_key, node_streams
from weft.ops.sampling.hop import HopSample, check_fanout, check_slots
from weft.ops.sampling.paper_triton import PaperLaunch, run_partitions, staged_row
from weft.ops.sampling.reservoir_triton import row_bounds
from weft.ops.sampling.sample_triton import count_picks


@dataclass(frozen=True)
class ThreadsLaunch:
    """``degree_threshold`` (a power of two): rows from here on have a block of their own, at most ``high_programs`` at
    a time; ``num_warps`` per program; ``threads_per_row`` (a power of two) of the rows below it."""

    degree_threshold: int = 256
    threads_per_row: int = 1
    high_programs: int = 1056
    num_warps: int = 4


@triton.jit
def _last_claims(stream, degree, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets ``[KP, BLOCK]`` of the picks of rows, one per thread."""
    slot = tl.arange(0, KP)[:, None]
    chosen = slot + tl.zeros([KP, BLOCK], tl.int32)
    for neighbour in range(K, tl.max(degree, 0)):
        number = tl.full([BLOCK], neighbour, tl.int32)
        draw = tl.where(neighbour < degree, draw_below(stream, number, number + 1), K)
        chosen = tl.where(slot == draw[None, :], neighbour, chosen)
    return chosen


@triton.jit
def _last_claims_shared(
    stream, degree, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """The same with EACH threads per row: a tile is ``[KP, BLOCK, EACH]``, the last two dimensions the threads."""
    slot = tl.arange(0, KP)[:, None, None]
    chosen = slot + tl.zeros([KP, BLOCK, EACH], tl.int32)
    turn = tl.arange(0, EACH)[None, :] + tl.zeros([BLOCK, EACH], tl.int32)
    for lowest in range(K, tl.max(degree, 0), EACH):
        neighbour = lowest + turn
        draw = tl.where(neighbour < degree[:, None], draw_below(stream[:, None], neighbour, neighbour + 1), K)
        chosen = tl.where(slot == draw[None, :, :], neighbour[None, :, :], chosen)
    return tl.max(chosen, 2)


@triton.jit
def _rows_of_low_degree(
    key, indptr, indices, rows, order, first, num_rows, out_indptr, sources,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The rows at ``first .. first + BLOCK`` of the order."""
    place = first + tl.arange(0, BLOCK)
    there = place < num_rows
    row = tl.load(order + place, mask=there, other=0)
    node, start, degree = row_bounds(indptr, rows, row, there)
    begin = tl.load(out_indptr + row, mask=there, other=0)
    stream = node_streams(key, node)
    if EACH == 1:
        chosen = _last_claims(stream, degree, K, KP, BLOCK)
    else:
        chosen = _last_claims_shared(stream, degree, K, KP, BLOCK, EACH)
    slot = tl.arange(0, KP)[:, None]
    filled = there[None, :] & (slot < tl.minimum(degree, K)[None, :])
    source = tl.load(indices + start[None, :] + chosen, mask=filled, other=0)
    tl.store(sources + begin[None, :] + slot, source, mask=filled)


@jit_any_size("num_rows", "hop")
def _threads_kernel(
    indptr, indices, rows, order, num_rows, sizes, clock, hop, out_indptr, sources,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr, EDGES: tl.constexpr,
    HIGH: tl.constexpr, LOW: tl.constexpr,
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
            _rows_of_low_degree(
                key, indptr, indices, rows, order, first, num_rows, out_indptr, sources, K, KP, BLOCK, EACH
            )  # fmt: skip


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
    sources = _room(seeds, fanout)
    if seeds.numel() == 0:
        return _nothing(indptr, seeds, fanout, sources)
    launch, width = launch or ThreadsLaunch(), next_power_of_2(fanout)
    out_indptr, order, sizes = order_by_class(indptr, seeds, fanout)
    threads, high = 32 * launch.num_warps, min(launch.high_programs, seeds.numel())
    block = threads // launch.threads_per_row
    _threads_kernel[(high + triton.cdiv(seeds.numel(), block),)](
        indptr, indices, seeds, order, seeds.numel(), sizes, clock, hop, out_indptr, sources,
        fanout, width, block, launch.threads_per_row, max(threads, 8192 // width), high,
        first_low_class(launch.degree_threshold),
        num_warps=launch.num_warps,
    )  # fmt: skip
    return HopSample(out_indptr, sources)


def sample_classes_triton(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanout: int,
    clock: Tensor,
    hop: int = 0,
    *,
    launch: PaperLaunch | None = None,
) -> HopSample:
    """As :func:`weft.ops.sampling.paper_triton.sample_paper_triton`; its threshold must be a power of two."""
    sources = _room(seeds, fanout)
    if seeds.numel() == 0:
        return _nothing(indptr, seeds, fanout, sources)
    launch = launch or PaperLaunch()
    out_indptr, order, sizes = order_by_class(indptr, seeds, fanout)
    num_high = sizes[: first_low_class(launch.degree_threshold)].sum(dtype=torch.int32).reshape(1)
    run_partitions(indptr, indices, seeds, order, num_high, clock, hop, out_indptr, sources, fanout, launch)
    return HopSample(out_indptr, sources)


def _room(seeds: Tensor, fanout: int) -> Tensor:
    check_fanout(fanout)
    check_slots(seeds.numel(), fanout)
    return torch.empty(seeds.numel() * fanout, dtype=torch.int32, device=seeds.device)


def _nothing(indptr: Tensor, seeds: Tensor, fanout: int, sources: Tensor) -> HopSample:
    none = torch.zeros(1, dtype=torch.int32, device=seeds.device)
    return HopSample(count_picks(indptr, seeds, none, fanout, replace=False), sources)
