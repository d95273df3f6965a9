"""Generate a graph whose classes only the relations of its edges tell.

Some nodes are hubs, each of one of C kinds, which their features show. Every other node of class c has an edge of
relation r from a hub of kind ``(c + r) mod C``, for every r below C. So each node has one neighbour of every kind,
and without the relations all neighbourhoods look alike: a model that does not read them cannot do better than guess.

Shapes: N nodes, C classes, hub kinds and relations, F features.
"""

from __future__ import annotations

import torch

from weft.core.errors import GraphError
from weft.graph.generate.citation import bell_noise, class_centres, planted_classes, split_nodes
from weft.graph.generate.draws import Stream, below, hash_range, stream_key
from weft.graph.graph import Graph
from weft.graph.split_rules import SHARES

FEATURES, SIGNAL = 16, 6.0  # and the distance of two kinds of hubs in noise deviations


def planted_relations(
    num_nodes: int,
    num_classes: int,
    *,
    hubs_per_kind: int = 8,
    random_edges: int = 4,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Graph:
    """A directed graph of ``num_nodes`` labelled nodes and ``num_classes * hubs_per_kind`` hubs without labels.

    ``random_edges``: edges of random relations per node, from nodes whose features are noise. A seed gives the same
    graph on every device.
    """
    if not 2 <= num_classes <= num_nodes:
        raise GraphError(f"num_classes={num_classes} must lie in 2..{num_nodes}, the number of nodes")
    if hubs_per_kind < 1 or random_edges < 0:
        raise GraphError(f"hubs_per_kind={hubs_per_kind} must be at least 1, random_edges={random_edges} not negative")
    classes = planted_classes(num_nodes, num_classes, skew=0.0, seed=seed, device=device).to(torch.int64)
    # One edge per node and kind of hub, which tells the class, and random ones.
    kinds, nodes = torch.arange(num_classes, device=device), torch.arange(num_nodes, device=device)
    bits = hash_range(stream_key(seed, Stream.EDGE), 0, num_nodes * num_classes, device).view(num_nodes, num_classes)
    hub = num_nodes + (classes[:, None] + kinds) % num_classes * hubs_per_kind + below(bits, hubs_per_kind)
    noise_src, noise_relation = (
        below(hash_range(stream_key(seed, stream), 0, num_nodes * random_edges, device), bound)
        for stream, bound in ((Stream.SCRAMBLE, num_nodes), (Stream.RELATION, num_classes))
    )
    src = torch.cat([hub.flatten(), noise_src])
    dst = torch.cat([nodes.repeat_interleave(num_classes), nodes.repeat_interleave(random_edges)])
    relation = torch.cat([kinds.repeat(num_nodes), noise_relation])
    hubs = num_classes * hubs_per_kind
    y = torch.cat([classes, classes.new_full((hubs,), -1)])
    # Noise, and on hubs the centre of their kind.
    x = bell_noise(0, (num_nodes + hubs) * FEATURES, seed, device).view(-1, FEATURES)
    x[num_nodes:] += class_centres(num_classes, FEATURES, SIGNAL, seed, device).repeat_interleave(hubs_per_kind, 0)
    parts = dict(zip(("train", "val", "test"), split_nodes(SHARES, classes, seed), strict=True))
    counts = {"num_nodes": num_nodes + hubs, "num_classes": num_classes, "num_relations": num_classes}
    return Graph.from_edges(src, dst, relation=relation, x=x, y=y, name="relations", **parts, **counts)
