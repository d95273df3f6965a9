"""Relabelling of sampled hops on the GPU: seeds first, new nodes in order of first appearance, no size read back.

A table with one int32 per node holds the local id of every node of the batch, else EMPTY. During a hop,
``atomic_min`` leaves in it the first slot at which a new neighbour appears, shifted by the node capacity so that slots
and local ids cannot be confused. Slots that are their node's first are flagged, a prefix sum of the flags numbers the
new nodes in order, and every slot reads its local id from its node's first slot. The minimum does not depend on the
order of the atomics, so the result is deterministic. After the batch its own entries are reset to EMPTY.

Shapes: N nodes, S rows, K fan-out, P = S * K slots, M node capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.settings import most_picks
from weft.ops.launch.triton_lang import jit_any_size, tl, triton
from weft.ops.sampling.reference import HopSample, RelationFanouts, check_fanout, check_slots
from weft.ops.sampling.sample_triton import CachedLists, launch_sample, launch_sample_relations

EMPTY = 2**31 - 1


@dataclass(frozen=True)
class DeviceHop:
    """One hop on the device, padded to its capacity.

    ``indptr [S+1]`` int32 (rows beyond the existing ones are empty), ``indices [P]`` int32 local ids,
    ``edges [P]`` int64 or None, ``nodes [M]`` int32, ``num_rows [1]`` and ``num_nodes [1]`` int32: how many rows and
    nodes exist. The number of edges is ``indptr[-1]``.
    """

    indptr: Tensor
    indices: Tensor
    edges: Tensor | None
    nodes: Tensor
    num_rows: Tensor
    num_nodes: Tensor


@jit_any_size("num_seeds")
def _mark_seeds_kernel(table, seeds, num_seeds, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < num_seeds
    node = tl.load(seeds + place, mask=there, other=0)
    tl.atomic_min(table + node, place, mask=there, sem="relaxed")


@jit_any_size("total", "slots", "offset")
def _flag_kernel(table, sources, total, slots, offset, flags, BLOCK: tl.constexpr):
    """1 for a slot that is the first of a new node."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < tl.load(total)
    node = tl.load(sources + place, mask=there, other=0)
    first = tl.load(table + node, mask=there, other=0)
    tl.store(flags + place, (there & (first == place + offset)).to(tl.int32), mask=place < slots)


@jit_any_size("total", "slots", "offset")
def _assign_kernel(
    table, sources, total, slots, offset, ranks, num_before, nodes, num_after, indices, BLOCK: tl.constexpr
):
    """Local ids of all slots; new nodes are appended to ``nodes`` and counted."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < tl.load(total)
    before = tl.load(num_before)
    node = tl.load(sources + place, mask=there, other=0)
    entry = tl.load(table + node, mask=there, other=0)
    new = there & (entry >= offset)
    rank = tl.load(ranks + (entry - offset), mask=new, other=0)
    local = tl.where(new, before + rank - 1, entry)
    tl.store(indices + place, local, mask=there)
    tl.store(nodes + local, node, mask=new & (entry == place + offset))
    if tl.program_id(0) == 0:
        tl.store(num_after, before + tl.load(ranks + slots - 1))


@jit_any_size("num_before", "num_after", "capacity")
def _label_kernel(table, nodes, num_before, num_after, capacity, RESET: tl.constexpr, BLOCK: tl.constexpr):
    """Write the local ids of the new nodes into the table; RESET empties the entries of all nodes instead."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < tl.minimum(tl.load(num_after), capacity)
    node = tl.load(nodes + place, mask=there, other=0)
    if RESET:
        tl.store(table + node, tl.full([BLOCK], 2147483647, tl.int32), mask=there)
    else:
        tl.store(table + node, place, mask=there & (place >= tl.load(num_before)))


class Compactor:
    """The table of one sampler and the launches that use it, ``block`` slots per program; one batch at a time, on one
    stream."""

    def __init__(self, num_nodes: int, device: torch.device, block: int = 1024, num_warps: int = 8) -> None:
        self.num_nodes, self.block = num_nodes, block
        self._options = {"BLOCK": block, "num_warps": num_warps}
        self.table = torch.full((max(num_nodes, 1),), EMPTY, dtype=torch.int32, device=device)

    def capacity(self, seeds: int, fanouts: list[int]) -> int:
        """Nodes that a batch may have at most: duplicates among the seeds keep their rows."""
        count = seeds
        for fanout in fanouts:
            count = min(count * (fanout + 1), seeds + self.num_nodes)
        return count

    def _grid(self, size: int) -> tuple[int]:
        return (triton.cdiv(max(size, 1), self.block),)

    def begin(self, seeds: Tensor) -> None:
        """Enter the seeds ``[S]`` int32; the first of equal seeds counts."""
        if seeds.numel():
            grid = self._grid(seeds.numel())
            _mark_seeds_kernel[grid](self.table, seeds, seeds.numel(), **self._options)

    def assign(self, sample: HopSample, offset: int, nodes: Tensor, num_before: Tensor) -> tuple[Tensor, Tensor]:
        """``(indices [P], num_after [1])`` of a sample whose first slots are in the table, shifted by ``offset``."""
        slots, total = sample.sources.numel(), sample.indptr[-1:]
        indices, num_after = torch.empty_like(sample.sources), torch.empty_like(num_before)
        if slots == 0:
            return indices, num_before.clone()
        flags = torch.empty_like(sample.sources)
        grid, options = self._grid(slots), self._options
        _flag_kernel[grid](self.table, sample.sources, total, slots, offset, flags, **options)
        ranks = flags.cumsum(0, dtype=torch.int32)
        arguments = (self.table, sample.sources, total, slots, offset, ranks, num_before)
        _assign_kernel[grid](*arguments, nodes, num_after, indices, **options)
        return indices, num_after

    def label(self, nodes: Tensor, num_before: Tensor, num_after: Tensor, *, reset: bool) -> None:
        """Enter the new nodes, or remove the whole batch from the table."""
        if nodes.numel():
            grid = self._grid(nodes.numel())
            _label_kernel[grid](self.table, nodes, num_before, num_after, nodes.numel(), reset, **self._options)


def sample_hops_triton(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: list[int | tuple[int, ...]],
    clock: Tensor,
    compactor: Compactor,
    *,
    edges: bool = False,
    cached: CachedLists | None = None,
    relations: RelationFanouts | None = None,
    sample_hop: Callable[..., HopSample] = launch_sample,
) -> list[DeviceHop]:
    """All hops of a batch, seeds outwards; hop h samples for every node found before it. Nothing is read back.

    ``seeds [S]`` int32, ``clock [3]`` int64 on the device; fan-outs are at least 1. ``cached``: neighbour lists on the
    device in front of ``indices`` in host memory. A hop with a fan-out per relation needs ``relations``, any other is
    sampled by ``sample_hop``.
    """
    for fanout in fanouts:
        check_fanout(most_picks(fanout))
    compactor.begin(seeds)
    nodes, num_rows = seeds, torch.full((1,), seeds.numel(), dtype=torch.int32, device=seeds.device)
    hops = []
    for number, fanout in enumerate(fanouts):
        room = compactor.capacity(seeds.numel(), [most_picks(k) for k in fanouts[: number + 1]])
        offset = nodes.numel()  # every local id is below it
        marks = {"table": compactor.table, "table_offset": offset}
        if isinstance(fanout, int):
            check_slots(nodes.numel(), fanout)
            given = (indptr, indices, nodes, num_rows, fanout, clock, number)
            sample = sample_hop(*given, edges=edges, cached=cached, **marks)
        else:
            assert relations is not None, "a fan-out per relation needs rows per relation"
            slots = relations.slots(fanout, seeds.numel(), nodes.numel())
            arguments = (nodes, num_rows, relations.on_device[fanout], max(fanout), clock, number)
            sample = launch_sample_relations(relations.rows, *arguments, slots=slots, **marks)
        larger = torch.empty(room, dtype=torch.int32, device=seeds.device)
        larger[: nodes.numel()] = nodes
        local, num_nodes = compactor.assign(sample, offset, larger, num_rows)
        compactor.label(larger, num_rows, num_nodes, reset=number == len(fanouts) - 1)
        hops.append(DeviceHop(sample.indptr, local, sample.edges, larger, num_rows, num_nodes))
        nodes, num_rows = larger, num_nodes
    return hops
