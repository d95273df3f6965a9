"""Upper bounds on the size of a sampled batch, from the fan-outs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from weft.core.settings.fanout import most_picks
from weft.ops.sampling.relations import picks_at_most


@dataclass(frozen=True)
class BatchSize:
    """``rows[h]`` nodes that hop h samples for, ``edges[h]`` that it picks at most, ``nodes`` of the whole batch.

    ``new_edges``: what all hops pick together if each samples only for the nodes that the hop before it found.
    """

    rows: tuple[int, ...]
    edges: tuple[int, ...]
    nodes: int

    @property
    def new_edges(self) -> int:
        """Of a local subgraph."""
        per_row = (edges // max(rows, 1) for rows, edges in zip(self.rows, self.edges, strict=True))
        new = (after - before for before, after in pairwise((0, *self.rows)))
        return sum(count * most for count, most in zip(new, per_row, strict=True))


def capacity(
    fanouts: Sequence[int | tuple[int, ...]], seeds: int, num_nodes: int, num_edges: int | None = None
) -> BatchSize:
    """The most that ``seeds`` and their sampled neighbours can be; hop h samples for every node found before it.

    A fan-out of -1 takes all neighbours, and so each edge of the graph once at most; where their number is not known,
    only the number of nodes bounds it. Of a hop with a fan-out per relation each edge is picked once at most, too.
    """
    rows, edges, nodes = [], [], seeds
    for fanout in fanouts:
        rows.append(nodes)
        most = most_picks(fanout)
        picked = nodes * most if most >= 0 else nodes * num_nodes if num_edges is None else num_edges
        if not isinstance(fanout, int) and num_edges is not None:
            picked = num_edges if most < 0 else picks_at_most(most, seeds, nodes, num_edges)
        edges.append(picked)
        nodes = min(nodes + picked, max(num_nodes, seeds))
    return BatchSize(tuple(rows), tuple(edges), nodes)
