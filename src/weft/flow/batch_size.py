"""Upper bounds on the size of a sampled batch, from the fan-outs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSize:
    """``rows[h]`` nodes that hop h samples for, ``edges[h]`` that it picks at most, ``nodes`` of the whole batch."""

    rows: tuple[int, ...]
    edges: tuple[int, ...]
    nodes: int


def capacity(fanouts: Sequence[int], seeds: int, num_nodes: int) -> BatchSize:
    """The most that ``seeds`` and their sampled neighbours can be; hop h samples for every node found before it.

    A fan-out of -1 takes all neighbours, which only the number of nodes bounds.
    """
    rows, edges, nodes = [], [], seeds
    for fanout in fanouts:
        rows.append(nodes)
        picked = nodes * (fanout if fanout >= 0 else num_nodes)
        edges.append(picked)
        nodes = min(nodes + picked, max(num_nodes, seeds))
    return BatchSize(tuple(rows), tuple(edges), nodes)
