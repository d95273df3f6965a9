"""Plain references of what weft.dist.partition does with tensors: edges of a rank, and pieces of neighbours.

The edges of a rank are separated by where their source is (local, remote), and the neighbours of a node are cut into
pieces of at most ``ps``, which bounds the work of one warp.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.planner.partition import Partition


def owner(partition: Partition, node: int) -> int:
    """The rank that has ``node``."""
    return bisect_right(partition.bounds, node, 1, partition.ranks) - 1


def local_id(partition: Partition, node: int) -> int:
    """The number of ``node`` among the nodes of its rank."""
    return node - partition.bounds[owner(partition, node)]


@dataclass(frozen=True)
class ShardEdges:
    """The in-edges of one rank's nodes as two CSR matrices over the rank's rows.

    ``local_indices`` are ids among the rank's own nodes; ``remote_indices`` are places in ``halo``, the sorted global
    ids of the remote nodes that the rank reads.
    """

    local_indptr: list[int] = field(default_factory=lambda: [0])
    local_indices: list[int] = field(default_factory=list)
    remote_indptr: list[int] = field(default_factory=lambda: [0])
    remote_indices: list[int] = field(default_factory=list)
    halo: list[int] = field(default_factory=list)


def shard_edges(indptr: Sequence[int], indices: Sequence[int], partition: Partition, rank: int) -> ShardEdges:
    """The local and the remote edges of ``rank``."""
    nodes = range(*partition.bounds[rank : rank + 2])
    every = range(int(indptr[nodes.start]), int(indptr[nodes.stop]))
    shard = ShardEdges(halo=sorted({int(indices[edge]) for edge in every if int(indices[edge]) not in nodes}))
    position = {node: index for index, node in enumerate(shard.halo)}
    for node in nodes:
        for edge in range(int(indptr[node]), int(indptr[node + 1])):
            source = int(indices[edge])
            if source in nodes:
                shard.local_indices.append(source - nodes.start)
            else:
                shard.remote_indices.append(position[source])
        shard.local_indptr.append(len(shard.local_indices))
        shard.remote_indptr.append(len(shard.remote_indices))
    return shard


@dataclass(frozen=True)
class NeighbourPieces:
    """Pieces of at most ``ps`` neighbours: ``row``, first edge ``start`` and ``length`` of each."""

    row: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)


def neighbour_pieces(indptr: Sequence[int], ps: int) -> NeighbourPieces:
    """Cut the edges of every row into pieces of at most ``ps``, in order."""
    pieces = NeighbourPieces()
    for row in range(len(indptr) - 1):
        for start in range(int(indptr[row]), int(indptr[row + 1]), ps):
            pieces.row.append(row)
            pieces.start.append(start)
            pieces.length.append(min(ps, int(indptr[row + 1]) - start))
    return pieces
