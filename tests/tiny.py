"""A graph small enough to train on in milliseconds, in its variants."""

from __future__ import annotations

import torch

from weft.core.models import traits_of
from weft.graph.data.graph import Graph
from weft.graph.data.sparse_features import SparseFeatures

NODES, FEATURES, CLASSES, RELATIONS = 60, 9, 3, 4


def small(model="gcn") -> dict[str, int]:
    """Settings for a small model of this name, or of one of these names: those that it reads."""
    rows = [traits_of(one) for one in (model if isinstance(model, (list, tuple)) else [model])]
    read = {name for row in rows if row is not None for name in row.settings}
    return {name: value for name, value in {"hidden": 8, "heads": 2}.items() if name in read}


def tiny_graph(seed: int = 0, sparse: bool = False, multilabel: bool = False, weighted: bool = False) -> Graph:
    """60 nodes, classes that features and edges tell something about, 24/16/20 nodes in the splits."""
    random = torch.Generator().manual_seed(seed)
    y = torch.arange(NODES) % CLASSES
    src, dst = (torch.randint(0, NODES, (240,), generator=random) for _ in range(2))
    kept = (y[src] == y[dst]) | (torch.rand(240, generator=random) < 0.3)
    x = torch.randn(NODES, FEATURES, generator=random)
    x[torch.arange(NODES), y] += 1.5
    if sparse:
        x = SparseFeatures.from_torch(torch.where(x > 0.8, x, torch.zeros(())))
    labels = y
    if multilabel:
        labels = torch.stack([(y == c) | (torch.rand(NODES, generator=random) < 0.2) for c in range(4)], 1).float()
    weight = torch.rand(int(kept.sum()), generator=random) if weighted else None
    graph = Graph.from_edges(
        src[kept], dst[kept], NODES, x=x, y=labels, edge_weight=weight, directed=False, name="tiny"
    )
    relation = torch.arange(graph.num_edges, dtype=torch.int32) % RELATIONS  # for the models that read it
    graph = Graph(graph.adj, graph.x, graph.y, relation=relation, name="tiny", num_classes=graph.num_classes)
    return graph.random_split(train=24, val=16, seed=seed)
