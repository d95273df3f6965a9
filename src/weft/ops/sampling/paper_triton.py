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
from weft.ops.sampling.draws_triton import draw_below, hop_key, node_streams
from weft.ops.sampling.hop import HopSample, check_fanout, check_slots
from weft.ops.sampling.reservoir_triton import reservoir_in_global_memory, row_bounds
from weft.ops.sampling.sample_triton import count_picks


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
    place = seeds.long()
    degree = indptr[place + 1] - indptr[place]
    ordered, order = torch.sort(degree.to(torch.int32), descending=True, stable=True)
    return order, (ordered >= threshold).sum(dtype=torch.int32).reshape(1)


def run_partitions(
    indptr: Tensor, indices: Tensor, seeds: Tensor, order: Tensor, num_high: Tensor, clock: Tensor, hop: int,
    out_indptr: Tensor, sources: Tensor, fanout: int, launch: PaperLaunch,
) -> None:  # fmt: skip
    """Sample the rows in ``order [S]``, of which the first ``num_high [1]`` reach the threshold, into ``sources``."""
    count, group = seeds.numel(), launch.rows_per_program * launch.warps_per_block
    grid = (triton.cdiv(count, group) * launch.warps_per_block,)
    for high, block in ((True, launch.block_edges), (False, launch.block_edges_low)):
        _partition_kernel[grid](
            indptr, indices, seeds, order, count, num_high, clock, hop, out_indptr, sources, launch.block_threshold,
            fanout, next_power_of_2(fanout), block, launch.rows_per_program, launch.warps_per_block, high, num_warps=1,
        )  # fmt: skip


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
    check_fanout(fanout)
    check_slots(seeds.numel(), fanout)
    launch, count = launch or PaperLaunch(), seeds.numel()
    everyone = torch.full((1,), count, dtype=torch.int32, device=seeds.device)
    out_indptr = count_picks(indptr, seeds, everyone, fanout, replace=False)
    sources = torch.empty(count * fanout, dtype=torch.int32, device=seeds.device)
    if count == 0:
        return HopSample(out_indptr, sources)
    order, num_high = sort_by_degree(indptr, seeds, launch.degree_threshold)
    run_partitions(indptr, indices, seeds, order, num_high, clock, hop, out_indptr, sources, fanout, launch)
    return HopSample(out_indptr, sources)
