"""Generate a graph whose classes only the relations of its edges tell.

Some nodes are hubs, each of one of C kinds, which their features show. Every other node of class c has an edge of
relation r from a hub of kind ``(c + r) mod C``, for every r below C. So each node has one neighbour of every kind,
and without the relations all neighbourhoods look alike: a model that does not read them cannot do better than guess.

Shapes: N nodes, C classes and hub kinds, R relations, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    _check(num_nodes, num_classes, relations, hubs_per_kind, random_edges)
    classes = planted_classes(num_nodes, num_classes, skew=0.0, seed=seed, device=device).to(torch.int64)
    told = _telling_edges(classes, num_classes, hubs_per_kind, seed)
    noise = _random_edges(num_nodes, relations, random_edges, seed, device)
    src, dst, relation = (torch.cat(parts) for parts in zip(told, noise, strict=True))
    hubs = num_classes * hubs_per_kind
    labels = observed_labels(classes, num_classes, label_noise, seed)
    y = torch.cat([labels, labels.new_full((hubs,), -1)])
    x = _features(num_nodes, num_classes, hubs_per_kind, num_features, feature_signal, seed, device)
    parts = dict(zip(("train", "val", "test"), split_nodes(split, labels, seed), strict=True))
    counts = {"num_nodes": num_nodes + hubs, "num_classes": num_classes, "num_relations": relations}
    return Graph.from_edges(src, dst, relation=relation, x=x, y=y, name=name, **parts, **counts)


def _check(nodes: int, classes: int, relations: int, hubs: int, random_edges: int) -> None:
    if relations < classes:
        raise GraphError(f"num_relations={relations} must be at least num_classes={classes}: as many tell the class")
    for value, what in ((classes - 1, "num_classes - 1"), (nodes - classes + 1, "nodes beyond one per class")):
        if value < 1:
            raise GraphError(f"{what} = {value} must be at least 1")
    if hubs < 1 or random_edges < 0:
        raise GraphError(f"hubs_per_kind={hubs} must be at least 1, random_edges={random_edges} not negative")


def _telling_edges(classes: Tensor, kinds: int, hubs: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(src, dst, relation)``: one edge per node and kind."""
    nodes, device = classes.numel(), classes.device
    relation = torch.arange(kinds, device=device).expand(nodes, kinds)
    kind = (classes[:, None] + relation) % kinds
    bits = hash_range(stream_key(seed, Stream.EDGE), 0, nodes * kinds, device).view(nodes, kinds)
    src = nodes + kind * hubs + below(bits, hubs)
    dst = torch.arange(nodes, device=device)[:, None].expand(nodes, kinds)
    return src.flatten(), dst.flatten(), relation.flatten()


def _random_edges(
    nodes: int, relations: int, count: int, seed: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    src, relation = (
        below(hash_range(stream_key(seed, stream), 0, nodes * count, device), bound)
        for stream, bound in ((Stream.SCRAMBLE, nodes), (Stream.RELATION, relations))
    )
    return src, torch.arange(nodes, device=device).repeat_interleave(count), relation


def _features(
    nodes: int, kinds: int, hubs: int, features: int, signal: float, seed: int, device: torch.device | str
) -> Tensor:
    """Noise, and on hubs the centre of their kind."""
    x = bell_noise(0, (nodes + kinds * hubs) * features, seed, device).view(-1, features)
    centres = class_centres(kinds, features, signal, seed, device)
    x[nodes:] += centres.repeat_interleave(hubs, 0)
    return x
