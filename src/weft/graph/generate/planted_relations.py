"""Generate a graph whose classes only the relations of its edges tell.

Some nodes are hubs, each of one of C kinds, which their features show. Every other node of class c has an edge of
relation r from a hub of kind ``(c + r) mod C``, for every r below C. So each node has one neighbour of every kind,
and without the relations all neighbourhoods look alike: a model that does not read them cannot do better than guess.

Shapes: N nodes, C classes and hub kinds, R relations, F features.
"""

from __future__ import annotations

import torch

from weft.core.errors import GraphError
from weft.graph.generate.citation import bell_noise, class_centres, observed_labels, planted_classes, split_nodes
from weft.graph.generate.draws import Stream, below, hash_range, stream_key
from weft.graph.graph import Graph
from weft.graph.split_rules import SHARES, SplitRule


def planted_relations(
    num_nodes: int,
    num_classes: int,
    *,
    num_relations: int | None = None,
    num_features: int = 16,
    hubs_per_kind: int = 8,
    random_edges: int = 4,
    feature_signal: float = 6.0,
    label_noise: float = 0.0,
    seed: int = 0,
    split: SplitRule = SHARES,
    device: torch.device | str = "cpu",
    name: str = "relations",
) -> Graph:
    """A directed graph of ``num_nodes`` labelled nodes and ``num_classes * hubs_per_kind`` hubs without labels.

    - ``num_relations``: R, at least C (the default); relations from C on have random edges alone.
    - ``random_edges``: edges of random relations per node, from nodes whose features are noise.
    - ``feature_signal``: distance of two kinds of hubs in noise deviations.
    - ``label_noise``: share of nodes whose label is not their class.

    A seed gives the same graph on every device.
    """
    relations = num_classes if num_relations is None else num_relations
    if relations < num_classes:
        raise GraphError(
            f"num_relations={relations} must be at least num_classes={num_classes}: as many tell the class"
        )
    for value, term in (
        (num_classes - 1, "num_classes - 1"),
        (num_nodes - num_classes + 1, "nodes beyond one per class"),
    ):
        if value < 1:
            raise GraphError(f"{term} = {value} must be at least 1")
    if hubs_per_kind < 1 or random_edges < 0:
        raise GraphError(f"hubs_per_kind={hubs_per_kind} must be at least 1, random_edges={random_edges} not negative")
    classes = planted_classes(num_nodes, num_classes, skew=0.0, seed=seed, device=device).to(torch.int64)
    # One edge per node and kind of hub, which tells the class, and random ones.
    kinds, nodes = torch.arange(num_classes, device=device), torch.arange(num_nodes, device=device)
    bits = hash_range(stream_key(seed, Stream.EDGE), 0, num_nodes * num_classes, device).view(num_nodes, num_classes)
    hub = num_nodes + (classes[:, None] + kinds) % num_classes * hubs_per_kind + below(bits, hubs_per_kind)
    noise_src, noise_relation = (
        below(hash_range(stream_key(seed, stream), 0, num_nodes * random_edges, device), bound)
        for stream, bound in ((Stream.SCRAMBLE, num_nodes), (Stream.RELATION, relations))
    )
    src = torch.cat([hub.flatten(), noise_src])
    dst = torch.cat([nodes.repeat_interleave(num_classes), nodes.repeat_interleave(random_edges)])
    relation = torch.cat([kinds.repeat(num_nodes), noise_relation])
    hubs = num_classes * hubs_per_kind
    labels = observed_labels(classes, num_classes, label_noise, seed)
    y = torch.cat([labels, labels.new_full((hubs,), -1)])
    # Noise, and on hubs the centre of their kind.
    x = bell_noise(0, (num_nodes + hubs) * num_features, seed, device).view(-1, num_features)
    x[num_nodes:] += class_centres(num_classes, num_features, feature_signal, seed, device).repeat_interleave(
        hubs_per_kind, 0
    )
    parts = dict(zip(("train", "val", "test"), split_nodes(split, labels, seed), strict=True))
    counts = {"num_nodes": num_nodes + hubs, "num_classes": num_classes, "num_relations": relations}
    return Graph.from_edges(src, dst, relation=relation, x=x, y=y, name=name, **parts, **counts)
