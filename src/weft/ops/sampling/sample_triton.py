"""Neighbour sampling on the GPU in O(K) per node: exact, without atomics, its cost independent of the degree.

Each thread runs Floyd's algorithm for one row: a tile is ``[K, rows]`` with rows along the threads, so all picks of a
row are in one thread's registers and comparing a draw with the earlier picks needs no communication. The result equals
:func:`weft.ops.sampling.reference.sample_torch` bit for bit.

No size is read back: arrays have room for ``S * K`` picks and ``indptr[-1]`` on the device holds their number.
The graph's arrays may lie in pinned host memory.

Shapes: N nodes, E edges, S rows, K fan-out, P = S * K slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.ops.random_bits_triton import splitmix
from weft.ops.sampling.reference import FULL, HopSample, RelationRows, check_fanout, check_slots, sample_torch

# ---- The draws of :mod:`weft.ops.sampling.reference` in Triton


@triton.jit
def hop_key(clock, hop):
    """Key of one hop, a uint64; ``clock`` points to (seed, epoch, batch)."""
    key = splitmix(tl.load(clock).to(tl.uint64, bitcast=True))
    key = splitmix(key + tl.load(clock + 1).to(tl.uint64, bitcast=True))
    key = splitmix(key + tl.load(clock + 2).to(tl.uint64, bitcast=True))
    return splitmix(key + hop)


@triton.jit
def node_streams(key, nodes):
    """The stream of each node, uint64."""
    return splitmix(splitmix(key) ^ splitmix(nodes.to(tl.int64).to(tl.uint64, bitcast=True)))


@triton.jit
def draw_below(streams, number, bound):
    """Draw ``number`` of each stream: int32 in ``[0, bound)``; ``number`` is not negative."""
    bits = splitmix(streams + number.to(tl.uint64) * 0x9E3779B97F4A7C15)
    limit = bound.to(tl.uint64)
    return (((bits >> 32) * limit + (((bits & 0xFFFFFFFF) * limit) >> 32)) >> 32).to(tl.int32)


LARGEST_FANOUT = 1024  # picks of a row that fit into registers; beyond, the reference runs on the device


@dataclass(frozen=True)
class CachedLists:
    """Neighbour lists of some nodes on the device, in front of a graph in host memory, or of all on several devices.

    ``indices [C]`` int32: the lists one after another; ``starts [N]`` int32 or int64: where that of a node begins,
    counted from the first of ``indices``, -1 where there is none; ``read [2]`` int64 counts lists that were read, and
    those that were here.
    """

    indices: Tensor
    starts: Tensor
    read: Tensor

    @property
    def bytes(self) -> int:
        """Of the device."""
        return sum(t.numel() * t.element_size() for t in (self.indices, self.starts))


def spread_lists(parts: Sequence[Tensor], bounds: Sequence[int], indptr: Tensor) -> CachedLists:
    """The lists between ``indptr [N+1]`` of an array whose ranges ``bounds`` lie in several ``parts``, no list in two.

    A list begins at a distance from the part with the lowest address, which may be far behind the end of that part.
    """
    first = min((part for part in parts if part.numel()), key=Tensor.data_ptr, default=parts[0])
    distances = [(part.data_ptr() - first.data_ptr()) // first.element_size() for part in parts]
    begin, ends = indptr[:-1].long(), torch.tensor(bounds[1:], device=indptr.device)
    owner = torch.searchsorted(ends, begin, right=True).clamp_(max=len(parts) - 1)  # of empty lists at the end
    shifts = torch.tensor(distances, device=begin.device) - torch.tensor(bounds[:-1], device=begin.device)
    return CachedLists(first, begin + shifts[owner], torch.zeros(2, dtype=torch.int64, device=begin.device))


@dataclass(frozen=True)
class SampleLaunch:
    """Rows per program and warps of the sampling kernel."""

    block_rows: int
    num_warps: int


def choose_launch(fanout: int) -> SampleLaunch:
    """One row per thread while its picks fit into registers, fewer rows for large fan-outs."""
    width = next_power_of_2(fanout)
    if width <= 32:
        return SampleLaunch(128, 4)
    return SampleLaunch(max(1, 4096 // width), 4)


@jit_any_size("num_rows", "capacity")
def _count_kernel(
    indptr, rows, num_rows, counts, capacity, K: tl.constexpr, REPLACE: tl.constexpr, BLOCK: tl.constexpr
):
    """``counts[row + 1]``: picks of every row, 0 beyond the rows that exist."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < tl.minimum(tl.load(num_rows).to(tl.int32), capacity)
    node = tl.load(rows + row, mask=there, other=0).to(tl.int64)
    start = tl.load(indptr + node, mask=there, other=0)
    degree = tl.load(indptr + node + 1, mask=there, other=0) - start
    count = tl.where(degree > 0, K, 0) if REPLACE else tl.minimum(degree, K)
    tl.store(counts + row + 1, count.to(tl.int32), mask=row < capacity)
    tl.store(counts + row, 0, mask=row == 0)


@triton.jit
def floyd_step(chosen, slot, streams, degree, j, fanout, BLOCK: tl.constexpr):
    """Fill slot ``j``: a draw from ``[0, d - K + j]``, or that end itself if the draw was taken before."""
    last = tl.maximum(degree - fanout + j, 0)
    draw = draw_below(streams, tl.full([BLOCK], j, tl.int32), last + 1)
    repeated = tl.max((chosen == draw[None, :]).to(tl.int32), 0) > 0
    return tl.where(slot == j, tl.where(repeated, last, draw)[None, :], chosen)


@triton.jit
def _pick(streams, degree, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, REPLACE: tl.constexpr):
    """Offsets ``[KP, BLOCK]`` of the picks; those beyond a row's count are meaningless."""
    slot = tl.arange(0, KP)[:, None]
    if REPLACE:
        return draw_below(streams[None, :], slot, degree[None, :])
    chosen = tl.full([KP, BLOCK], -1, tl.int32)
    if KP <= 32:
        # Unrolled, a slot number is known at compile time and writing it is a move, not a selection.
        for j in tl.static_range(K):
            chosen = floyd_step(chosen, slot, streams, degree, j, K, BLOCK)
    else:
        for j in range(K):
            chosen = floyd_step(chosen, slot, streams, degree, j, K, BLOCK)
    return tl.where(degree[None, :] <= K, slot, chosen)


@jit_any_size("num_rows", "capacity", "hop", "table_offset")
def _sample_kernel(
    indptr, indices, rows, num_rows, capacity, clock, hop, out_indptr, sources, edges, table, table_offset,
    near, near_start, read, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, REPLACE: tl.constexpr,
    EDGES: tl.constexpr, MARK: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """Pick and write; MARK also records in ``table`` the first slot at which every neighbour appears.

    CACHED reads the neighbours of a node from ``near`` if ``near_start`` has a place for them there, and counts rows and
    those in ``read``.
    """
    count = tl.minimum(tl.load(num_rows).to(tl.int32), capacity)
    if tl.program_id(0) * BLOCK >= count:
        return
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < count
    node = tl.load(rows + row, mask=there, other=0).to(tl.int64)
    start = tl.load(indptr + node, mask=there, other=0).to(tl.int64)
    degree = (tl.load(indptr + node + 1, mask=there, other=0).to(tl.int64) - start).to(tl.int32)
    begin = tl.load(out_indptr + row, mask=there, other=0)
    offset = _pick(node_streams(hop_key(clock, hop), node), degree, K, KP, BLOCK, REPLACE)
    slot = tl.arange(0, KP)[:, None]
    picks = tl.where(degree > 0, K, 0) if REPLACE else tl.minimum(degree, K)
    valid = there[None, :] & (slot < picks[None, :])
    edge = start[None, :] + offset
    if CACHED:
        held = tl.load(near_start + node, mask=there, other=-1).to(tl.int64)
        here = (held >= 0)[None, :]
        source = tl.load(indices + edge, mask=valid & (held < 0)[None, :], other=0)
        kept = tl.load(near + held[None, :] + offset, mask=valid & here, other=0)
        source = tl.where(here, kept, source)
        tl.atomic_add(read, tl.sum(there.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(read + 1, tl.sum((held >= 0).to(tl.int64), 0), sem="relaxed")
    else:
        source = tl.load(indices + edge, mask=valid, other=0)
    place = begin[None, :] + slot
    tl.store(sources + place, source, mask=valid)
    if EDGES:
        tl.store(edges + place, edge, mask=valid)
    if MARK:
        tl.atomic_min(table + source, place + table_offset, mask=valid, sem="relaxed")


def count_picks(indptr: Tensor, rows: Tensor, num_rows: Tensor, fanout: int, replace: bool) -> Tensor:
    """``indptr [S+1]`` int32 of the sample of ``rows [S]``, of which the first ``num_rows [1]`` (on the device) exist."""
    capacity, block = rows.numel(), 256
    counts = torch.empty(capacity + 1, dtype=torch.int32, device=rows.device)
    if capacity == 0:
        return counts.zero_()
    grid = (triton.cdiv(capacity, block),)
    _count_kernel[grid](indptr, rows, num_rows, counts, capacity, fanout, replace, block)
    return counts.cumsum(0, dtype=torch.int32)


def launch_sample(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor,
    num_rows: Tensor,
    fanout: int,
    clock: Tensor,
    hop: int,
    *,
    replace: bool = False,
    edges: bool = False,
    table: Tensor | None = None,
    table_offset: int = 0,
    cached: CachedLists | None = None,
    launch: SampleLaunch | None = None,
) -> HopSample:
    """Sample the first ``num_rows [1]`` of ``rows [S]``; ``table [N]`` int32 takes the first slot of each neighbour.

    ``cached``: neighbour lists that are read from the device, where ``indices`` is in host memory.
    """
    check_slots(rows.numel(), fanout)
    launch = launch or choose_launch(fanout)
    out_indptr = count_picks(indptr, rows, num_rows, fanout, replace)
    sources = torch.empty(rows.numel() * fanout, dtype=torch.int32, device=rows.device)
    where = torch.empty(sources.numel() if edges else 1, dtype=torch.int64, device=rows.device)
    if rows.numel():
        grid = (triton.cdiv(rows.numel(), launch.block_rows),)
        _sample_kernel[grid](
            indptr, indices, rows, num_rows, rows.numel(), clock, hop, out_indptr, sources, where,
            out_indptr if table is None else table, table_offset,
            *((indices, rows, clock) if cached is None else (cached.indices, cached.starts, cached.read)),
            fanout, next_power_of_2(fanout), launch.block_rows, replace, edges, table is not None, cached is not None,
            num_warps=launch.num_warps,
        )  # fmt: skip
    return HopSample(out_indptr, sources, where if edges else None)


def sample_triton(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanout: int,
    clock: Tensor,
    hop: int = 0,
    *,
    replace: bool = False,
    weight: Tensor | None = None,
    edges: bool = False,
    launch: SampleLaunch | None = None,
) -> HopSample:
    """As :func:`sample_torch`, on the GPU. ``seeds [S]`` int32 and ``clock [3]`` lie there.

    Weighted sampling, all neighbours and fan-outs above 1024 run the reference on the device, which reads sizes back.
    """
    check_fanout(fanout, replace, weight is not None)
    if weight is not None or fanout == FULL or fanout > LARGEST_FANOUT:
        return sample_torch(indptr, indices, seeds, fanout, clock, hop, replace=replace, weight=weight)
    everyone = torch.full((1,), seeds.numel(), dtype=torch.int32, device=seeds.device)
    options = {"replace": replace, "edges": edges, "launch": launch}
    return launch_sample(indptr, indices, seeds, everyone, fanout, clock, hop, **options)


# ---- Sampling per relation: one thread per (row, relation), exact, O(fan-out), nothing read back.
#
# The result equals :func:`weft.ops.sampling.reference.sample_relations_torch` bit for bit.
#
# Shapes: N nodes, R relations, S rows, V = S * R virtual rows, K the largest fan-out, P slots.


COUNT_BLOCK = 256


@triton.jit
def _bounds(indptr, rows, num_rows, fanouts, capacity, BLOCK: tl.constexpr, RELATIONS: tl.constexpr):
    """``(virtual row, whether it exists, id of its stream, start, degree, fan-out)`` of a block."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, relation = place // RELATIONS, place % RELATIONS
    there = row < tl.minimum(tl.load(num_rows).to(tl.int64), capacity)
    node = tl.load(rows + row, mask=there, other=0).to(tl.int64) * RELATIONS + relation
    start = tl.load(indptr + node, mask=there, other=0).to(tl.int64)
    degree = (tl.load(indptr + node + 1, mask=there, other=0).to(tl.int64) - start).to(tl.int32)
    fanout = tl.load(fanouts + relation, mask=there, other=0)
    return place, there, node, start, degree, fanout


@jit_any_size("num_rows", "capacity")
def _count_relations_kernel(
    indptr, rows, num_rows, fanouts, counts, capacity, BLOCK: tl.constexpr, RELATIONS: tl.constexpr
):
    """``counts[place + 1]``: picks of every virtual row, 0 beyond those that exist."""
    place, there, _, _, degree, fanout = _bounds(indptr, rows, num_rows, fanouts, capacity, BLOCK, RELATIONS)
    count = tl.where(there, tl.minimum(degree, fanout), 0)
    tl.store(counts + place + 1, count, mask=place < capacity * RELATIONS)
    tl.store(counts + place, 0, mask=place == 0)


@jit_any_size("num_rows", "capacity", "hop", "table_offset")
def _sample_relations_kernel(
    indptr, indices, rows, num_rows, fanouts, capacity, clock, hop, out_indptr, sources, edges, table, table_offset,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, RELATIONS: tl.constexpr, MARK: tl.constexpr,
):  # fmt: skip
    """Pick and write; MARK also records in ``table`` the first slot at which every neighbour appears."""
    place, there, node, start, degree, fanout = _bounds(indptr, rows, num_rows, fanouts, capacity, BLOCK, RELATIONS)
    picks = tl.where(there, tl.minimum(degree, fanout), 0)
    if tl.max(picks, 0) == 0:
        return
    begin = tl.load(out_indptr + place, mask=there, other=0)
    streams = node_streams(hop_key(clock, hop), node)
    slot = tl.arange(0, KP)[:, None]
    chosen = tl.full([KP, BLOCK], -1, tl.int32)
    for j in range(K):
        chosen = floyd_step(chosen, slot, streams, degree, j, fanout, BLOCK)
    offset = tl.where((degree <= fanout)[None, :], slot, chosen)
    valid = slot < picks[None, :]
    edge = start[None, :] + offset
    source = tl.load(indices + edge, mask=valid, other=0)
    at = begin[None, :] + slot
    tl.store(sources + at, source, mask=valid)
    tl.store(edges + at, edge, mask=valid)
    if MARK:
        tl.atomic_min(table + source, at + table_offset, mask=valid, sem="relaxed")


def launch_sample_relations(
    graph: RelationRows,
    rows: Tensor,
    num_rows: Tensor,
    fanouts: Tensor,
    most: int,
    clock: Tensor,
    hop: int,
    *,
    slots: int,
    table: Tensor | None = None,
    table_offset: int = 0,
) -> HopSample:
    """Sample the first ``num_rows [1]`` of ``rows [S]`` into at most ``slots`` places.

    ``fanouts [R]`` int32 on the device, each from 0 to ``most``, which is at most 1,024.
    """
    check_slots(rows.numel(), graph.relations)
    relations, capacity, device = graph.relations, rows.numel(), rows.device
    counts = torch.zeros(capacity * relations + 1, dtype=torch.int32, device=device)
    sources = torch.empty(max(slots, 1), dtype=torch.int32, device=device)
    edges = torch.empty(max(slots, 1), dtype=torch.int64, device=device)
    if capacity:
        grid = (triton.cdiv(capacity * relations, COUNT_BLOCK),)
        _count_relations_kernel[grid](graph.indptr, rows, num_rows, fanouts, counts, capacity, COUNT_BLOCK, relations)
    out_indptr = counts.cumsum(0, dtype=torch.int32)
    if capacity:
        launch = choose_launch(most)
        grid = (triton.cdiv(capacity * relations, launch.block_rows),)
        _sample_relations_kernel[grid](
            graph.indptr, graph.indices, rows, num_rows, fanouts, capacity, clock, hop, out_indptr, sources, edges,
            out_indptr if table is None else table, table_offset,
            most, next_power_of_2(most), launch.block_rows, relations, table is not None, num_warps=launch.num_warps,
        )  # fmt: skip
    return HopSample(out_indptr[::relations].contiguous(), sources, edges)
