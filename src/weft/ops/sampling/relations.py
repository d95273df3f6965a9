"""Sampling per relation: rows of (node, relation), and the meaning of a hop with a fan-out for each relation.

A node's picks of relation r are drawn from the stream of the row ``node * R + r``, so they do not depend on the other
relations. :func:`sample_relations_torch` is the reference; the kernels for CPU and GPU give the same bits.

Shapes: N nodes, E edges, R relations, S seeds, V = S * R rows, P sampled edges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.csr.adjacency import Adjacency, offset_dtype
from weft.ops.sampling.reference import MOST_SLOTS, HopSample, all_edges, floyd, hop_key, node_streams, offsets_of


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
