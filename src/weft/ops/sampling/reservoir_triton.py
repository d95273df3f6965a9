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
from typing import Any

import torch
from torch import Tensor

from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.ops.sampling.reference import HopSample, check_fanout, check_slots
from weft.ops.sampling.sample_triton import CachedLists, count_picks, draw_below, hop_key, node_streams


@dataclass(frozen=True)
class ReservoirLaunch:
    """Edges that a warp reads at once, and rows that it handles one after another."""

    block_edges: int = 64
    rows_per_program: int = 4


AS_DGL = ReservoirLaunch(block_edges=32, rows_per_program=16)


@jit_any_size("num_rows", "capacity", "hop", "table_offset")
def _reservoir_kernel(
    indptr, indices, rows, num_rows, capacity, clock, hop, out_indptr, sources, edges, table, table_offset,
    near, near_start, read, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, TASKS: tl.constexpr,
    EDGES: tl.constexpr, MARK: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """Slots live in the result (in ``edges`` if these are requested) and are claimed there.

    MARK, CACHED: as of the default sampler.
    """
    key = hop_key(clock, hop)
    count = tl.minimum(tl.load(num_rows).to(tl.int32), capacity)
    slot = tl.arange(0, KP)
    for task in range(TASKS):
        row = tl.program_id(0) * TASKS + task
        if row < count:
            node = tl.load(rows + row).to(tl.int64)
            start = tl.load(indptr + node).to(tl.int64)
            degree = (tl.load(indptr + node + 1).to(tl.int64) - start).to(tl.int32)
            begin = tl.load(out_indptr + row)
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
            offset = tl.load(slots + slot, mask=filled, other=0, volatile=True)
            tl.debug_barrier()
            if CACHED:
                held = tl.load(near_start + node).to(tl.int64)
                cached = (slot * 0 + held) >= 0  # a vector, as the interpreter needs it in a mask
                source = tl.load(indices + start + offset, mask=filled & ~cached, other=0)
                source += tl.load(near + held + offset, mask=filled & cached, other=0)
                tl.atomic_add(read, 1, sem="relaxed")
                tl.atomic_add(read + 1, (held >= 0).to(tl.int64), sem="relaxed")
            else:
                source = tl.load(indices + start + offset, mask=filled, other=0)
            tl.store(sources + begin + slot, source, mask=filled)
            if EDGES:
                tl.store(edges + begin + slot, start + offset, mask=filled)
            if MARK:
                tl.atomic_min(table + source, begin + slot + table_offset, mask=filled, sem="relaxed")


def launch_reservoir(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor,
    num_rows: Tensor,
    fanout: int,
    clock: Tensor,
    hop: int,
    *,
    edges: bool = False,
    table: Tensor | None = None,
    table_offset: int = 0,
    cached: CachedLists | None = None,
    launch: ReservoirLaunch | None = None,
) -> HopSample:
    """Sample the first ``num_rows [1]`` of ``rows [S]``: see :func:`weft.ops.sampling.sample_triton.launch_sample`."""
    check_fanout(fanout)
    check_slots(rows.numel(), fanout)
    launch = launch or ReservoirLaunch()
    out_indptr = count_picks(indptr, rows, num_rows, fanout, replace=False)
    sources = torch.empty(rows.numel() * fanout, dtype=torch.int32, device=rows.device)
    where = torch.empty(sources.numel() if edges else 1, dtype=torch.int64, device=rows.device)
    if rows.numel():
        grid = (triton.cdiv(rows.numel(), launch.rows_per_program),)
        _reservoir_kernel[grid](
            indptr, indices, rows, num_rows, rows.numel(), clock, hop, out_indptr, sources, where,
            out_indptr if table is None else table, table_offset,
            *((indices, rows, clock) if cached is None else (cached.indices, cached.starts, cached.read)),
            fanout, next_power_of_2(fanout), launch.block_edges, launch.rows_per_program, edges, table is not None,
            cached is not None, num_warps=1,
        )  # fmt: skip
    return HopSample(out_indptr, sources, where if edges else None)


def sample_reservoir_triton(
    indptr: Tensor, indices: Tensor, seeds: Tensor, fanout: int, clock: Tensor, hop: int = 0, **options: Any
) -> HopSample:
    """Sample ``min(fanout, degree)`` in-neighbours of ``seeds [S]`` int32; sizes stay on the device."""
    everyone = torch.full((1,), seeds.numel(), dtype=torch.int32, device=seeds.device)
    return launch_reservoir(indptr, indices, seeds, everyone, fanout, clock, hop, **options)
