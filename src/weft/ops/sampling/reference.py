"""Neighbour sampling of one hop in plain torch: the meaning of every sampler, on any device.

Uniform sampling without replacement is Floyd's algorithm: for ``j = d - k, ..., d - 1`` draw ``t`` from ``[0, j]``
(both ends included) and take ``t``, or ``j`` if ``t`` was taken before. It makes k draws whatever the degree d, and
every subset of k neighbours is equally likely.

Shapes: N nodes, E edges, S seeds, K fan-out, P sampled edges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import GraphError, InputError
from weft.ops.csr.adjacency import Adjacency, offset_dtype
from weft.ops.random_bits import GOLDEN64, LOW32, shift_right, signed64, splitmix

# ---- Random draws of the samplers: (seed, epoch, batch, hop, node) names a stream, and a stream has draws 0, 1, 2,
#
# A stream is SplitMix64 started at a 64-bit hash of those five numbers, so a node's draws do not depend on the rest
# of its batch, on threads, on workers or on the device. The clock is an int64 tensor ``[3] = (seed, epoch, batch)``:
# a kernel that reads it from memory can be replayed for the next batch.
#
# A draw below ``bound`` is the upper half of a 64 x 32 bit product. Its probabilities differ from ``1 / bound`` by
# less than 2^-64, and it needs no rejection. Bounds are degrees, so they stay below 2^31.
#
# The same arithmetic is in ``cpu_kernels.py`` for numba and in ``sample_triton.py`` for Triton; tests compare bits.

LOG_2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476
LOG_TERMS = 21  # of the series of atanh, up to s^21: relative error below 1e-15


def make_clock(seed: int, epoch: int, batch: int, device: torch.device | str = "cpu") -> Tensor:
    """The clock ``[3]`` int64 of one batch."""
    return torch.tensor([signed64(seed), signed64(epoch), signed64(batch)], dtype=torch.int64, device=device)


def epoch_clocks(seed: int, epoch: int, batches: int, device: torch.device | str = "cpu") -> Tensor:
    """The clocks ``[batches, 3]`` int64 of an epoch; the device writes them itself, nothing is copied there."""
    batch = torch.arange(batches, dtype=torch.int64, device=device)
    return torch.stack([torch.full_like(batch, signed64(number)) for number in (seed, epoch)] + [batch], dim=1)


def hop_key(clock: Tensor, hop: int) -> Tensor:
    """Key ``[]`` int64 of one hop of one batch."""
    key = splitmix(clock[0])
    for number in (clock[1], clock[2], hop):
        key = splitmix(key + number)
    return key


def node_streams(key: Tensor, nodes: Tensor) -> Tensor:
    """The stream ``[S]`` int64 of each node ``[S]``."""
    return splitmix(splitmix(key) ^ splitmix(nodes.long()))


def draw_bits(streams: Tensor, number: int | Tensor) -> Tensor:
    """64 random bits of draw ``number`` of each stream, as int64."""
    step = signed64(number * GOLDEN64) if isinstance(number, int) else number * signed64(GOLDEN64)
    return splitmix(streams + step)


def draw_below(streams: Tensor, number: int | Tensor, bound: Tensor) -> Tensor:
    """Draw ``number`` of each stream: int64 in ``[0, bound)``, all equally likely; 0 where the bound is 0."""
    bits, bound = draw_bits(streams, number), bound.long()
    high, low = shift_right(bits, 32), bits & LOW32
    return (high * bound + ((low * bound) >> 32)) >> 32


def draw_exponential(streams: Tensor, number: Tensor) -> Tensor:
    """Draw ``number`` of each stream from the exponential distribution, float64.

    The logarithm is a series of single additions and multiplications, so every device rounds it alike.
    """
    unit = (shift_right(draw_bits(streams, number), 11).to(torch.float64) + 0.5) * 2.0**-53
    mantissa, exponent = torch.frexp(unit)
    small = mantissa < SQRT_HALF
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = torch.where(small, exponent - 1, exponent).to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = s * s, torch.full_like(s, 1.0 / LOG_TERMS)
    for term in range(LOG_TERMS - 2, 0, -2):
        total = total * square
        total = total + 1.0 / term
    series = s * total
    return -(exponent * LOG_2 + series * 2.0)


# ---- What a sampler of one hop returns, and the checks that all samplers share

FULL = -1  # a fan-out: every neighbour
MOST_SLOTS = 2**31 - 1  # positions in a batch are int32


@dataclass(frozen=True)
class HopSample:
    """Sampled in-edges of S seeds as a CSR of global ids.

    ``indptr [S+1]`` int32, ``sources [P]`` int32: the picked neighbours of seed i are
    ``sources[indptr[i]:indptr[i+1]]``. ``edges [P]`` int64 holds where each picked edge is in the graph's CSR (None
    if it was not requested). On a GPU the arrays may be longer than ``indptr[-1]``; entries beyond are unspecified.
    """

    indptr: Tensor
    sources: Tensor
    edges: Tensor | None = None

    def trimmed(self) -> HopSample:
        """The same without unused slots; reads one number back from the device."""
        count = int(self.indptr[-1])
        return HopSample(self.indptr, self.sources[:count], None if self.edges is None else self.edges[:count])


@dataclass(frozen=True)
class Relabelled:
    """Compacted result of one hop: local ids in place of global ones.

    ``nodes [M]`` int32 are the hop's seeds in their order, then new neighbours in order of first appearance;
    ``indices [P]`` int32 are positions in ``nodes``. A neighbour that equals several seeds is the first of them.
    """

    nodes: Tensor
    indices: Tensor


def check_fanout(fanout: int, replace: bool = False, weighted: bool = False) -> None:
    """Raise an InputError for a fan-out that no sampler can take."""
    if fanout < 1 and fanout != FULL:
        raise InputError(f"fan-out {fanout} must be at least 1, or -1 for every neighbour")
    if replace and weighted:
        raise InputError("weighted sampling is without replacement; leave out replace=True or the weights")


def check_slots(seeds: int, fanout: int) -> None:
    """Raise an InputError if the positions of a hop could exceed 32 bits."""
    if seeds * (fanout + 1) > MOST_SLOTS:
        raise InputError(
            f"{seeds:,} nodes x fan-out {fanout} need more than 2^31 slots in one batch; use a smaller batch or fan-out"
        )


def check_seeds(seeds: Tensor, num_nodes: int) -> Tensor:
    """Seeds ``[S]`` as contiguous int32 if all are in ``[0, N)``; a GraphError that names the first other one.

    Reads the device once; samplers call this for ids that come from a user, not for those they found themselves.
    """
    if seeds.dim() != 1 or seeds.is_floating_point() or seeds.dtype == torch.bool:
        raise GraphError(f"seeds must be a vector of node ids, not {seeds.dtype} of shape {list(seeds.shape)}")
    wrong = (seeds < 0) | (seeds >= num_nodes)
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0, 0])
        raise GraphError(
            f"seed {int(seeds[position])} at position {position} must be a node id from 0 to {num_nodes - 1}"
        )
    return seeds.to(torch.int32).contiguous()


def sample_torch(
    indptr: Tensor,
    indices: Any,
    seeds: Tensor,
    fanout: int,
    clock: Tensor,
    hop: int = 0,
    *,
    replace: bool = False,
    weight: Tensor | None = None,
) -> HopSample:
    """Sample ``min(fanout, degree)`` in-neighbours of every seed.

    ``indptr [N+1]`` int32 or int64, ``indices [E]`` int32, ``seeds [S]``, ``clock [3]`` = (seed, epoch, batch),
    ``weight [E]`` not negative (neighbours of weight 0 are never drawn). ``replace`` draws ``fanout`` neighbours
    independently; a fan-out of -1 takes all of them once, whatever their weights. Of ``indices`` only the picked ones
    are read, so that it may be anything with values at ids, such as an array that lies with several ranks.
    """
    check_fanout(fanout, replace, weight is not None)
    seeds = seeds.long()
    start, degree = indptr[seeds].long(), (indptr[seeds + 1] - indptr[seeds]).long()
    streams = node_streams(hop_key(clock, hop), seeds)
    if fanout == FULL:
        edges, counts = all_edges(start, degree)[1], degree
    elif weight is not None:
        # `(edges, counts)` of the neighbours with the smallest exponential keys `E / weight`, in the order of
        # edges.
        row, edge = all_edges(start, degree)
        weights = weight[edge].to(torch.float64)
        keys = draw_exponential(streams[row], edge - start[row]) / weights
        keys = torch.where(weights > 0, keys, torch.inf)
        order = torch.sort(keys, stable=True).indices
        order = order[torch.sort(row[order], stable=True).indices]  # rows together, keys ascending in each
        rank = torch.arange(row.numel(), device=row.device) - (degree.cumsum(0) - degree)[row]
        picked = torch.zeros_like(row, dtype=torch.bool)
        picked[order] = (rank < fanout) & torch.isfinite(keys[order])
        edges, counts = edge[picked], torch.bincount(row[picked], minlength=degree.numel())
    else:
        columns, rows = torch.arange(fanout, device=degree.device), degree[:, None]
        if replace:
            offsets, taken = draw_below(streams[:, None], columns, rows), (rows > 0).expand(-1, fanout)
        else:
            offsets = torch.where(rows <= fanout, columns, floyd(degree, fanout, streams, fanout))
            taken = columns < rows
        edges, counts = (start[:, None] + offsets)[taken], taken.sum(1)
    return HopSample(offsets_of(counts), indices[edges], edges)


def offsets_of(counts: Tensor) -> Tensor:
    """``indptr [S+1]`` int32 of rows with so many entries."""
    indptr = torch.zeros(counts.numel() + 1, dtype=torch.int32, device=counts.device)
    indptr[1:] = counts.cumsum(0)
    return indptr


def all_edges(start: Tensor, degree: Tensor) -> tuple[Tensor, Tensor]:
    """``(row, edge)`` of all in-edges of the rows, both int64."""
    row = torch.repeat_interleave(torch.arange(degree.numel(), device=degree.device), degree)
    first = degree.cumsum(0) - degree
    return row, torch.arange(row.numel(), device=row.device) + (start - first)[row]


def floyd(degree: Tensor, fanout: int | Tensor, streams: Tensor, most: int) -> Tensor:
    """Offsets ``[rows, most]`` by Floyd's algorithm; those beyond a row's ``fanout`` are meaningless."""
    chosen = torch.full((degree.numel(), most), -1, dtype=torch.int64, device=degree.device)
    for slot in range(most):
        last = (degree - fanout + slot).clamp(min=0)
        draw = draw_below(streams, slot, last + 1)
        repeated = (chosen == draw[:, None]).any(1)
        chosen[:, slot] = torch.where(repeated, last, draw)
    return chosen


def sample_reservoir_torch(
    indptr: Tensor, indices: Tensor, seeds: Tensor, fanout: int, clock: Tensor, hop: int = 0
) -> HopSample:
    """Uniform sampling without replacement by a reservoir, O(degree): what the two kernels of the paper compute.

    Slot s starts with neighbour s; neighbour ``i >= K`` draws a number from ``[0, i]`` and claims that slot if it is
    below K. The last neighbour to claim a slot keeps it.
    """
    check_fanout(fanout)
    seeds = seeds.long()
    start, degree = indptr[seeds].long(), (indptr[seeds + 1] - indptr[seeds]).long()
    streams = node_streams(hop_key(clock, hop), seeds)
    columns = torch.arange(fanout, device=seeds.device)
    chosen = columns.repeat(seeds.numel(), 1)
    for neighbour in range(fanout, int(degree.max()) if degree.numel() else 0):
        bound = torch.tensor(neighbour + 1, device=seeds.device)
        claimed = (draw_below(streams, neighbour, bound)[:, None] == columns) & (degree > neighbour)[:, None]
        chosen[claimed] = neighbour
    taken = columns < degree[:, None]
    edges = (start[:, None] + chosen)[taken]
    return HopSample(offsets_of(taken.sum(1)), indices[edges], edges)


def relabel_torch(seeds: Tensor, sources: Tensor) -> Relabelled:
    """Number the nodes of one hop: seeds ``[S]`` first, then new ones of ``sources [P]`` by first appearance."""
    together = torch.cat([seeds, sources]).to(torch.int32)
    values, inverse = torch.unique(together, return_inverse=True)
    first = torch.full((values.numel(),), together.numel(), dtype=torch.int64, device=together.device)
    positions = torch.arange(together.numel(), device=together.device)
    first.scatter_reduce_(0, inverse, positions, "amin")
    new = (first[inverse] == positions) & (positions >= seeds.numel())
    numbered = new | (positions < seeds.numel())  # a seed keeps its row even if it is repeated
    local = numbered.cumsum(0) - 1
    return Relabelled(together[numbered], local[first[inverse[seeds.numel() :]]].to(torch.int32))


# ---- Sampling per relation: rows of (node, relation), and the meaning of a hop with a fan-out for each relation.
#
# A node's picks of relation r are drawn from the stream of the row ``node * R + r``, so they do not depend on the other
# relations. :func:`sample_relations_torch` is the reference; the kernels for CPU and GPU give the same bits.
#
# Shapes: N nodes, E edges, R relations, S seeds, V = S * R rows, P sampled edges.


@dataclass(frozen=True)
class RelationRows:
    """A CSR with a row per (node, relation): ``indptr [N R + 1]``, ``indices [E]``, ``relations`` = R.

    ``order [E]``: where each of its edges is in the matrix that it was made of.
    """

    indptr: Tensor
    indices: Tensor
    order: Tensor
    relations: int

    @classmethod
    def of(cls, adj: Adjacency, relation: Tensor, relations: int) -> RelationRows:
        """Sort the edges of every row by their ``relation [E]``, in the order of ``adj``."""
        rows = adj.num_rows * relations
        if rows > MOST_SLOTS:
            raise InputError(
                f"{adj.num_rows:,} nodes x {relations:,} relations are more than 2^31 rows; "
                "give one fan-out for all relations together"
            )
        key, order = torch.sort(adj.rows().long() * relations + relation, stable=True)
        starts = torch.searchsorted(key, torch.arange(rows + 1, device=adj.device))
        dtype = offset_dtype(adj.num_edges)
        return cls(starts.to(dtype), adj.indices[order], order.to(dtype), relations)

    def plain_indptr(self) -> Tensor:
        """``[N + 1]``: the rows of whole nodes."""
        return self.indptr[:: self.relations].contiguous()


class RelationFanouts:
    """The rows of a graph per relation, with the fan-outs per relation that a sampler uses, on the device."""

    def __init__(self, rows: RelationRows, fanouts: Iterable[int | tuple[int, ...]]) -> None:
        self.rows, device = rows, rows.indices.device
        apart = {fanout for fanout in fanouts if not isinstance(fanout, int)}
        # Made once: a step that is captured as a CUDA graph may not copy from the host.
        self.on_device = {fanout: torch.tensor(fanout, dtype=torch.int32, device=device) for fanout in apart}

    def slots(self, fanout: tuple[int, ...], seeds: int, nodes: int) -> int:
        """Places that the picks of ``nodes`` need at most: only seeds can be repeated, others give each edge once."""
        return picks_at_most(sum(fanout), seeds, nodes, self.rows.indices.numel())


def picks_at_most(fanout: int, seeds: int, nodes: int, num_edges: int) -> int:
    """Picks of ``nodes`` nodes that are ``seeds``, maybe repeated, and others, all different."""
    return min(nodes * fanout, num_edges + seeds * fanout)


def sample_relations_torch(
    rows: RelationRows, seeds: Tensor, fanouts: tuple[int, ...], clock: Tensor, hop: int = 0
) -> HopSample:
    """Sample ``min(fanouts[r], degree)`` in-neighbours of every relation r of every seed; -1: all of them.

    The picks of a seed stand relation by relation.
    """
    device, count = seeds.device, rows.relations
    virtual = (seeds.long()[:, None] * count + torch.arange(count, device=device)).flatten()
    start, degree = rows.indptr[virtual].long(), (rows.indptr[virtual + 1] - rows.indptr[virtual]).long()
    fanout = torch.tensor(fanouts, device=device).repeat(seeds.numel())
    whole = (fanout < 0) | (degree <= fanout)
    counts = torch.where(whole, degree, fanout)
    indptr = offsets_of(counts)
    edges = torch.empty(int(counts.sum()), dtype=torch.int64, device=device)
    row, edge = all_edges(start, torch.where(whole, degree, 0))
    edges[indptr[row] + (edge - start[row])] = edge
    some = (~whole).nonzero().squeeze(1)
    streams = node_streams(hop_key(clock, hop), virtual[some])
    picks = floyd(degree[some], fanout[some], streams, max(*fanouts, 0))
    slots = torch.arange(picks.shape[1], device=device)
    taken = slots < fanout[some][:, None]
    edges[(indptr[some].long()[:, None] + slots)[taken]] = (start[some][:, None] + picks)[taken]
    return HopSample(indptr[::count].contiguous(), rows.indices[edges], edges)
