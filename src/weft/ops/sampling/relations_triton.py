"""Sampling per relation on the GPU: one thread per (row, relation), exact, O(fan-out), nothing read back.

The result equals :func:`weft.ops.sampling.relations.sample_relations_torch` bit for bit.

Shapes: N nodes, R relations, S rows, V = S * R virtual rows, K the largest fan-out, P slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.ops.sampling.reference import HopSample, check_slots
from weft.ops.sampling.relations import RelationRows
from weft.ops.sampling.sample_triton import choose_launch, floyd_step, hop_key, node_streams

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
