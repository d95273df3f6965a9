"""The reservoir sampler that TurboGNN is compared with: O(degree) per node, atomics in global memory.

It follows the uniform row-wise kernel of DGL: one warp per row scans all in-edges of the row, and an edge that draws a
slot below K claims it with an atomic maximum on the result in global memory. Consecutive rows go to consecutive warps
whatever their degrees. A program here is one warp. The draws are Weft's counter-based ones, so the result equals
:func:`weft.ops.sampling.reference.sample_reservoir_torch` bit for bit.

:data:`AS_DGL` is the layout of DGL 0.8, which the paper compares with: 16 rows per warp one after another, 32 edges at
a time, slots of 64 bits (``edges=True``). The default launch is leaner than that: fewer rows in a row, two edges per
thread, 32-bit slots.

Shapes: N nodes, E edges, S rows, K fan-out, P = S * K slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.ops.sampling.reference import HopSample, check_fanout, check_slots
from weft.ops.sampling.sample_triton import count_picks, draw_below, hop_key, node_streams


@dataclass(frozen=True)
class ReservoirLaunch:
    """Edges that a warp reads at once, and rows that it handles one after another."""

    block_edges: int = 64
    rows_per_program: int = 4


AS_DGL = ReservoirLaunch(block_edges=32, rows_per_program=16)


@triton.jit
def row_bounds(indptr, rows, row, there):
    """``(node, start, degree)`` of a row; a row that does not exist has degree 0."""
    node = tl.load(rows + row, mask=there, other=0).to(tl.int64)
    start = tl.load(indptr + node, mask=there, other=0).to(tl.int64)
    degree = (tl.load(indptr + node + 1, mask=there, other=0).to(tl.int64) - start).to(tl.int32)
    return node, start, degree


@triton.jit
def reservoir_in_global_memory(
    key, node, start, degree, begin, indices, sources, edges,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """One row: slots live in the result (in ``edges`` if these are requested) and are claimed there."""
    slot = tl.arange(0, KP)
    filled = slot < tl.minimum(degree, K)
    if EDGES:
        slots = edges + begin
    else:
        slots = sources + begin
    tl.store(slots + slot, slot, mask=filled)
    if degree > K:
        tl.debug_barrier()
        stream = node_streams(key, node)
        for first in range(K, degree, BLOCK):
            neighbour = first + tl.arange(0, BLOCK)
            draw = draw_below(stream, neighbour, neighbour + 1)
            claims = (neighbour < degree) & (draw < K)
            tl.atomic_max(slots + draw, neighbour.to(slots.dtype.element_ty), mask=claims, sem="relaxed")
        tl.debug_barrier()
    edge = start + tl.load(slots + slot, mask=filled, other=0, volatile=True)
    tl.debug_barrier()
    tl.store(sources + begin + slot, tl.load(indices + edge, mask=filled, other=0), mask=filled)
    if EDGES:
        tl.store(edges + begin + slot, edge, mask=filled)


@jit_any_size("num_rows", "hop")
def _reservoir_kernel(
    indptr, indices, rows, num_rows, clock, hop, out_indptr, sources, edges,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, TASKS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    key = hop_key(clock, hop)
    for task in range(TASKS):
        row = tl.program_id(0) * TASKS + task
        if row < num_rows:
            node, start, degree = row_bounds(indptr, rows, row, row < num_rows)
            begin = tl.load(out_indptr + row)
            reservoir_in_global_memory(
                key, node, start, degree, begin, indices, sources, edges, K, KP, BLOCK, EDGES
            )  # fmt: skip


def room_for_picks(indptr: Tensor, seeds: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
    """``(indptr [S+1], sources [S K])`` int32 of a sample of ``seeds [S]``: where picks begin, and memory for them."""
    check_fanout(fanout)
    check_slots(seeds.numel(), fanout)
    everyone = torch.full((1,), seeds.numel(), dtype=torch.int32, device=seeds.device)
    sources = torch.empty(seeds.numel() * fanout, dtype=torch.int32, device=seeds.device)
    return count_picks(indptr, seeds, everyone, fanout, replace=False), sources


def sample_reservoir_triton(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanout: int,
    clock: Tensor,
    hop: int = 0,
    *,
    edges: bool = False,
    launch: ReservoirLaunch | None = None,
) -> HopSample:
    """Sample ``min(fanout, degree)`` in-neighbours of ``seeds [S]`` int32; sizes stay on the device."""
    launch = launch or ReservoirLaunch()
    out_indptr, sources = room_for_picks(indptr, seeds, fanout)
    where = torch.empty(sources.numel() if edges else 1, dtype=torch.int64, device=seeds.device)
    if seeds.numel():
        grid = (triton.cdiv(seeds.numel(), launch.rows_per_program),)
        _reservoir_kernel[grid](
            indptr, indices, seeds, seeds.numel(), clock, hop, out_indptr, sources, where,
            fanout, next_power_of_2(fanout), launch.block_edges, launch.rows_per_program, edges, num_warps=1,
        )  # fmt: skip
    return HopSample(out_indptr, sources, where if edges else None)
