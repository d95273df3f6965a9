"""Count relations of edges: how many there are, how many edges each has, and how many (node, relation) pairs.

Shapes: E edges, R relations.
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.ops.csr.adjacency import Adjacency

MOST_RELATIONS = 1 << 20  # more kinds of edges than that are a column of something else


def check_relations(relation: Tensor | None, num_relations: int | None) -> int:
    """R of checked relation numbers ``[E]``: as given, or the largest plus one; 0 without any."""
    if num_relations is not None and (isinstance(num_relations, bool) or not isinstance(num_relations, Integral)):
        raise GraphError(f"num_relations={num_relations!r} must be a whole number")
    if relation is None:
        if num_relations:
            raise GraphError(f"num_relations={num_relations} without relation; give the relation of every edge as well")
        return 0
    found = int(relation.max()) + 1 if relation.numel() else 0
    most = max(found, num_relations or 0)
    if most > MOST_RELATIONS:
        raise GraphError(f"{most:,} relations are more than {MOST_RELATIONS:,}; renumber them 0, 1, 2, ...")
    if num_relations is not None and found > num_relations:
        raise GraphError(f"relation {found - 1} must be below num_relations={num_relations}")
    return found if num_relations is None else int(num_relations)


def relation_edges(adj: Adjacency) -> tuple[int, ...]:
    """Edges of every relation."""
    if adj.relation is None:
        return ()
    return tuple(torch.bincount(adj.relation, minlength=adj.num_relations).tolist())


def relation_rows(adj: Adjacency) -> int:
    """Pairs of a node and a relation that it has an in-edge of."""
    if adj.relation is None:
        return 0
    keys = torch.sort(adj.relation.long() * adj.num_rows + adj.rows()).values
    return int((keys.diff() != 0).sum()) + 1 if keys.numel() else 0
