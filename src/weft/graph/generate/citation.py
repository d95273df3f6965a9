"""Generate a citation-like graph: power-law degrees, planted classes, features that hint at the class."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.data.graph import Graph
from weft.graph.data.sparse_features import SparseFeatures
from weft.graph.data.split_rules import SHARES, Split
from weft.graph.generate.attributes import bag_of_words, dense_features
from weft.graph.generate.counter import COIN_SIDES, Stream, coin_side
from weft.graph.generate.degrees import hub_draws, power_law
from weft.graph.generate.planted_labels import (
    observed_labels,
    observed_tasks,
    planted_classes,
    same_class_rate,
    split_nodes,
)
from weft.graph.generate.popularity import Popularity
from weft.graph.generate.relations import relation_ids
from weft.graph.generate.wiring import directed_csr, planted_draw, undirected_csr
from weft.ops.csr.adjacency import Adjacency

DENSE_SIGNAL, WORD_SIGNAL = 2.0, 0.2
OUT_EXPONENT, OUT_SPREAD = 3.5, 20
MULTILABEL_GROUPS = 16


def citation(
    num_nodes: int,
    num_edges: int,
    num_features: int,
    num_classes: int,
    *,
    seed: int = 0,
    exponent: float = 2.5,
    max_degree: int | None = None,
    homophily: float = 0.7,
    feature_signal: float | None = None,
    density: float | None = None,
    class_skew: float = 0.5,
    label_noise: float = 0.05,
    directed: bool = False,
    relations: int = 0,
    multilabel: bool = False,
    split: Split = SHARES,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    name: str = "citation",
) -> Graph:
    """A power-law graph with planted classes on which a GNN beats a model that sees the features alone.

    ``num_edges`` counts stored entries: an undirected graph stores both directions, so an odd number loses
    one. The count is exact, there are no self loops and no edge is stored twice. No node is isolated where
    there are enough edges for that (undirected: two entries per node; directed: one, counting in-edges).

    - ``exponent``, ``max_degree``: tail of the degrees and the largest of them, at most 3/4 of the nodes.
      In-degrees of a directed graph follow it exactly, its out-degrees are milder; the degrees of an
      undirected graph scatter about it.
    - ``homophily``: share of edges that join equal labels. Hubs larger than their class lower it a little.
    - ``feature_signal``: dense features: distance of two class centres in noise deviations (default 2.0);
      sparse ones: share of words that are of the class's topic for sure (default 0.2).
    - ``density``: mean share of non-zero features; None for dense features.
    - ``label_noise``: share of nodes whose label is not their planted class: what no model can learn.
    - ``relations``: edges get relation numbers ``0 .. relations - 1``, the low ones often.
    - ``multilabel``: ``num_classes`` yes/no labels per node instead of one class.
    - ``split``: "planetoid", three shares, or three numbers of nodes.

    A seed gives the same graph on every device, features bit for bit. Memory beyond the result: directed
    graphs are built in chunks (about 6 GiB on a GPU); undirected ones need about 60 bytes per entry.
    """
    _check(num_nodes, num_edges, num_features, label_noise)
    groups = min(MULTILABEL_GROUPS, num_nodes) if multilabel else num_classes
    noise = 0.0 if multilabel else label_noise
    classes = planted_classes(num_nodes, groups, skew=class_skew, seed=seed, device=device)
    same = coin_side(same_class_rate(homophily, groups, noise))
    wire = _wire_directed if directed else _wire_undirected
    indptr, indices = wire(classes, groups, num_edges, exponent, max_degree, same, seed)
    relation = None
    if relations:
        relation = relation_ids(indptr, indices, relations, symmetric=not directed, seed=seed)
    y = observed_tasks(classes, num_classes, seed) if multilabel else observed_labels(classes, groups, noise, seed)
    x = _features(classes, num_features, groups, feature_signal, density, dtype, seed)
    train, val, test = split_nodes(split, y, seed)
    adj = Adjacency(indptr, indices, symmetric=not directed)
    counts = {"num_classes": num_classes, "num_relations": relations}
    return Graph(adj, x, y, train, val, test, relation, name, **counts)


def _check(num_nodes: int, num_edges: int, num_features: int, label_noise: float) -> None:
    if num_nodes < 2:
        raise GraphError(f"num_nodes={num_nodes} must be at least 2")
    if num_edges < 0 or num_features < 0:
        raise GraphError(f"num_edges={num_edges}, num_features={num_features}: neither may be negative")
    if not 0.0 <= label_noise < 1.0:
        raise GraphError(f"label_noise={label_noise} must lie in [0, 1): a share of nodes")
    room = num_nodes * (num_nodes - 1)
    if num_edges > room // 2:
        raise GraphError(
            f"num_edges={num_edges} would fill more than half of the {room} places between {num_nodes} nodes; "
            f"ask for at most {room // 2} or for more nodes"
        )


def degree_limit(num_nodes: int, num_edges: int, max_degree: int | None) -> int:
    """The largest degree to aim for: the given one, by default about ``10 * sqrt(E)``, at most 3/4 N."""
    limit = 3 * (num_nodes - 1) // 4
    mean = -(-num_edges // num_nodes)
    wanted = max_degree if max_degree is not None else max(8, 2 * mean, round(10 * num_edges**0.5))
    if max_degree is not None and max_degree * num_nodes < num_edges:
        raise GraphError(f"max_degree={max_degree} is below the mean degree {num_edges / num_nodes:.1f}; raise it")
    return max(1, mean, min(wanted, limit))


def _wire_directed(
    classes: Tensor, groups: int, num_edges: int, exponent: float, max_degree: int | None, same: int, seed: int
) -> tuple[Tensor, Tensor]:
    num_nodes, device = classes.numel(), classes.device
    top = degree_limit(num_nodes, num_edges, max_degree)
    degrees = power_law(
        num_nodes, num_edges, exponent=exponent, max_degree=top, seed=seed, stream=Stream.DEGREE, device=device
    )
    weights = power_law(
        num_nodes, max(num_edges, num_nodes), exponent=OUT_EXPONENT,
        max_degree=OUT_SPREAD * max(1, -(-num_edges // num_nodes)),
        seed=seed, stream=Stream.OUT_DEGREE, device=device,
    )  # fmt: skip
    draw = _class_draw(classes, groups, weights, same, seed)
    del weights
    return directed_csr(degrees, num_nodes, draw, loops=False)


def _wire_undirected(
    classes: Tensor, groups: int, num_edges: int, exponent: float, max_degree: int | None, same: int, seed: int
) -> tuple[Tensor, Tensor]:
    num_nodes, device = classes.numel(), classes.device
    top = degree_limit(num_nodes, num_edges, max_degree)
    # A node draws about half of its edges and is drawn for the others, in proportion to what it draws.
    hub = hub_draws(
        num_nodes, num_edges // 2, exponent=exponent, max_degree=top,
        num_classes=groups, same=same / COIN_SIDES,
    )  # fmt: skip
    owned = power_law(
        num_nodes, num_edges // 2, exponent=exponent, max_degree=hub,
        seed=seed, stream=Stream.DEGREE, device=device,
    )  # fmt: skip
    weights = owned if num_edges // 2 >= num_nodes else owned + 1
    return undirected_csr(owned, _class_draw(classes, groups, weights, same, seed))


def _class_draw(classes: Tensor, groups: int, weights: Tensor, same: int, seed: int):
    sides = torch.full((groups,), same, dtype=torch.int64, device=classes.device)
    popularity = Popularity.of(weights, classes, groups)
    return planted_draw(classes, popularity, sides, classes.numel(), seed, Stream.EDGE)


def _features(
    classes: Tensor,
    num_features: int,
    groups: int,
    signal: float | None,
    density: float | None,
    dtype: torch.dtype,
    seed: int,
) -> Tensor | SparseFeatures | None:
    if num_features == 0:
        return None
    if density is None:
        strength = DENSE_SIGNAL if signal is None else signal
        return dense_features(classes, num_features, groups, signal=strength, dtype=dtype, seed=seed)
    share = WORD_SIGNAL if signal is None else signal
    return bag_of_words(classes, num_features, groups, density=density, signal=share, dtype=dtype, seed=seed)
