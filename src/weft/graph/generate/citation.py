"""Generate a citation-like graph: power-law degrees, planted classes, features that hint at the class."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.generate.draws import (
    COIN_SIDES,
    Popularity,
    Stream,
    below,
    coin,
    coin_side,
    hash_range,
    permutation,
    spread_counts,
    stream_key,
)
from weft.graph.generate.wiring import (
    degree_histogram,
    directed_csr,
    hub_draws,
    planted_draw,
    relation_ids,
    undirected_csr,
)
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures
from weft.graph.split_rules import PER_CLASS, PLANETOID, PLANETOID_TEST, PLANETOID_VAL, SHARES, SplitRule
from weft.ops.csr.adjacency import Adjacency

# ---- Generate node features that are partly informative of the class
#
# Dense: a random centre per class plus noise. Sparse: a bag of words, some of them of the class's topic. Noise is a
# sum of uniform integers, not a logarithm or a cosine, so that every device rounds alike.
#
# Shapes: N nodes, F features, C classes.

CHUNK_VALUES = {"cpu": 2**20, "cuda": 2**26}  # a cache-sized block on a CPU, few launches on a GPU
NOISE_MEAN = 4 * (2**16 - 1) // 2
NOISE_SCALE = (3.0 / (2.0**32 - 1.0)) ** 0.5  # one over the deviation of a sum of four 16-bit integers


def dense_features(
    classes: Tensor, num_features: int, num_classes: int, *, signal: float, dtype: torch.dtype, seed: int
) -> Tensor:
    """``x [N, F]``: the class's centre plus noise of deviation 1.

    ``signal`` is the distance between two centres in deviations (2 leaves 16 % error between two classes),
    whatever F is. Written in row chunks: the temporaries do not grow with N.
    """
    device, num_nodes = classes.device, classes.numel()
    centres = class_centres(num_classes, num_features, signal, seed, device)
    x = torch.empty(num_nodes, num_features, dtype=dtype, device=device)
    rows = max(1, CHUNK_VALUES.get(device.type, 2**20) // max(1, num_features))
    for begin in range(0, num_nodes, rows):
        part = classes[begin : begin + rows]
        noise = bell_noise(begin * num_features, part.numel() * num_features, seed, device)
        # Two separate kernels: a fused multiply-add would round differently from device to device.
        x[begin : begin + rows] = noise.view(-1, num_features).add_(centres.index_select(0, part))
    return x


def class_centres(num_classes: int, num_features: int, signal: float, seed: int, device: torch.device | str) -> Tensor:
    """``[C, F]`` float32 of plus and minus one value; two centres differ in half of the places."""
    bits = hash_range(stream_key(seed, Stream.CENTRE), 0, num_classes * num_features, device)
    signs = (bits & 1).mul_(2).sub_(1).to(torch.float32).view(num_classes, num_features)
    return signs.mul_(signal / (2.0 * max(1, num_features)) ** 0.5)


def bell_noise(first: int, count: int, seed: int, device: torch.device | str) -> Tensor:
    """``[count]`` float32, mean 0, deviation 1, bell-shaped within 3.5 deviations."""
    bits = hash_range(stream_key(seed, Stream.NOISE), first, first + count, device)
    total = bits & 0xFFFF
    for shift in (16, 32, 48):
        total.add_((bits >> shift).bitwise_and_(0xFFFF))
    return total.sub_(NOISE_MEAN).to(torch.float32).mul_(NOISE_SCALE)


def bag_of_words(
    classes: Tensor,
    num_features: int,
    num_classes: int,
    *,
    density: float,
    signal: float,
    dtype: torch.dtype,
    seed: int,
) -> SparseFeatures:
    """``x [N, F]`` of ones and zeros: ``density * F`` words per node on average, between half and one and a half.

    Word j belongs to topic ``j % C`` and a topic's words are Zipf distributed. A share ``signal`` of a node's
    words is of its class's topic, the rest of any topic: 0 is uninformative, 1 fully informative.
    """
    if not 0.0 < density <= 0.5:
        raise GraphError(f"density={density} must lie in (0, 0.5]; leave it out for dense features")
    device = classes.device
    mean = max(1, round(density * num_features))
    low, high = (mean + 1) // 2, mean + mean // 2
    bits = hash_range(stream_key(seed, Stream.WORD_COUNT), 0, classes.numel(), device)
    counts = below(bits, high - low + 1).add_(low).clamp_(max=num_features).to(torch.int32)
    words = torch.arange(num_features, dtype=torch.int64, device=device)
    popularity = Popularity.of(10**6 // (words // num_classes + 4), words % num_classes, num_classes)
    own_topic = signal + (1.0 - signal) / num_classes
    sides = torch.full((num_classes,), coin_side(own_topic), dtype=torch.int64, device=device)
    draw = planted_draw(classes, popularity, sides, num_features, seed, Stream.WORD)
    indptr, indices = directed_csr(counts, num_features, draw, loops=True)
    values = torch.ones(indices.numel(), dtype=dtype, device=device)
    return SparseFeatures(Adjacency(indptr, indices, num_features, weight=values))


# ---- Plant classes, observe some of them, and choose the nodes to train and test on
#
# Shapes: N nodes, C classes (or, for several labels per node, C binary tasks).

ROW_BLOCK = 2**20


def planted_classes(num_nodes: int, num_classes: int, *, skew: float, seed: int, device: torch.device | str) -> Tensor:
    """Class of every node ``[N]`` int32; class c has a share in proportion to ``(c + 1) ^ -skew``, exactly."""
    if not 1 <= num_classes <= num_nodes:
        raise GraphError(f"num_classes={num_classes} must lie in 1..{num_nodes}, the number of nodes")
    shares = np.arange(1, num_classes + 1, dtype=np.float64) ** -skew
    ends = np.rint(np.cumsum(shares) / shares.sum() * (num_nodes - num_classes)).astype(np.int64)
    counts = np.diff(ends, prepend=0) + 1
    return spread_counts(torch.from_numpy(counts).to(device), seed, Stream.LABEL)


def observed_labels(classes: Tensor, num_classes: int, noise: float, seed: int) -> Tensor:
    """Labels ``[N]`` int64: the planted class, or with probability ``noise`` a random other one."""
    labels = classes.to(torch.int64)
    if noise <= 0.0 or num_classes < 2:
        return labels
    bits = hash_range(stream_key(seed, Stream.LABEL_NOISE), 0, labels.numel(), labels.device)
    other = below(bits, num_classes - 1).add_(labels).add_(1).remainder_(num_classes)
    return torch.where(coin(bits) < coin_side(noise), other, labels)


def observed_tasks(classes: Tensor, num_tasks: int, seed: int) -> Tensor:
    """Labels ``[N, C]`` float32 in {0, 1}: every class says yes to every task at a rate of its own."""
    device, num_classes = classes.device, int(classes.max()) + 1
    rates = hash_range(stream_key(seed, Stream.TASK_RATE), 0, num_classes * num_tasks, device)
    # Squared, so that most tasks are rare in most classes, as protein functions are.
    sides = (coin(rates).pow_(2) // COIN_SIDES).view(num_classes, num_tasks)
    labels = torch.empty(classes.numel(), num_tasks, dtype=torch.float32, device=device)
    for begin in range(0, classes.numel(), ROW_BLOCK):
        rows = classes[begin : begin + ROW_BLOCK]
        first, count = begin * num_tasks, rows.numel() * num_tasks
        bits = hash_range(stream_key(seed, Stream.TASK), first, first + count, device)
        labels[begin : begin + ROW_BLOCK] = coin(bits).view(-1, num_tasks) < sides.index_select(0, rows)
    return labels


def same_class_rate(homophily: float, num_classes: int, noise: float) -> float:
    """How often an edge must stay in its planted class for a share ``homophily`` of equal *labels*."""
    if not 0.0 <= homophily <= 1.0:
        raise GraphError(f"homophily={homophily} must lie in 0..1: the share of edges inside one class")
    if num_classes < 2:
        return 1.0
    rest = num_classes - 1
    inside = (1 - noise) ** 2 + noise**2 / rest
    across = 2 * (1 - noise) * noise / rest + noise**2 * (num_classes - 2) / rest**2
    rate = (homophily - across) / (inside - across)
    if rate > 1.0:
        raise GraphError(
            f"homophily={homophily} cannot be reached with label_noise={noise}: at most {inside:.3f}; lower one of them"
        )
    return max(rate, 0.0)


def split_nodes(split: SplitRule, labels: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Train, validation and test ids, sorted int64.

    ``split`` is "planetoid" (20 per class, 500, 1,000; fewer in graphs too small for that), three shares
    (floats) or three numbers of nodes (ints).
    """
    order = permutation(seed, Stream.SPLIT, labels.shape[0], labels.device)
    if split == PLANETOID:
        num_nodes, num_classes = labels.numel(), int(labels.max()) + 1
        per_class = max(1, min(PER_CLASS, num_nodes // (4 * num_classes)))
        by_class = order[torch.sort(labels[order], stable=True).indices]
        counts = torch.bincount(labels, minlength=num_classes)
        rank = torch.arange(num_nodes, device=labels.device) - (torch.cumsum(counts, 0) - counts)[labels[by_class]]
        train = by_class[rank < per_class]
        taken = torch.zeros(num_nodes, dtype=torch.bool, device=labels.device)
        taken[train] = True
        rest = order[~taken[order]]
        val = min(PLANETOID_VAL, rest.numel() // 3)
        test = min(PLANETOID_TEST, rest.numel() - val)
        return (train.sort().values, *_cut(rest, [val, test]))
    if isinstance(split, str) or len(split) != 3:
        raise GraphError(f"split={split!r}: give 'planetoid', three shares or three numbers of nodes")
    return _cut(order, split_sizes(split, labels.shape[0]))


def split_sizes(split: tuple[float, float, float], num_nodes: int) -> list[int]:
    """Nodes in train, val and test for three shares (floats) or three numbers of nodes (ints)."""
    sizes = [part if isinstance(part, int) else int(part * num_nodes + 1e-6) for part in split]
    if min(sizes) < 0 or sum(sizes) > num_nodes:
        raise GraphError(f"split={split} needs {sum(sizes)} of {num_nodes} nodes; lower it")
    if not any(isinstance(part, int) for part in split) and abs(sum(split) - 1.0) < 1e-9:
        sizes[2] = num_nodes - sizes[0] - sizes[1]
    return sizes


def _cut(order: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    parts = torch.split(order[: sum(sizes)], sizes)
    return tuple(part.sort().values for part in parts)


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
    split: SplitRule = SHARES,
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
            f"choose at most {room // 2}, or more nodes"
        )
    groups = min(MULTILABEL_GROUPS, num_nodes) if multilabel else num_classes
    noise = 0.0 if multilabel else label_noise
    classes = planted_classes(num_nodes, groups, skew=class_skew, seed=seed, device=device)
    same = coin_side(same_class_rate(homophily, groups, noise))
    most = degree_limit(num_nodes, num_edges, max_degree)
    if not directed:  # a node draws about half of its edges and is drawn for the others
        rate = same / COIN_SIDES
        most = hub_draws(num_nodes, num_edges // 2, exponent=exponent, max_degree=most, num_classes=groups, same=rate)
    degrees, weights = _degrees(classes, num_edges, exponent, most, seed, directed)
    sides = torch.full((groups,), same, dtype=torch.int64, device=classes.device)
    draw = planted_draw(classes, Popularity.of(weights, classes, groups), sides, num_nodes, seed, Stream.EDGE)
    del weights
    wired = directed_csr(degrees, num_nodes, draw, loops=False) if directed else undirected_csr(degrees, draw)
    indptr, indices = wired
    relation = None
    if relations:
        relation = relation_ids(indptr, indices, relations, symmetric=not directed, seed=seed)
    y = observed_tasks(classes, num_classes, seed) if multilabel else observed_labels(classes, groups, noise, seed)
    x: Tensor | SparseFeatures | None = None
    if num_features and density is None:
        signal = DENSE_SIGNAL if feature_signal is None else feature_signal
        x = dense_features(classes, num_features, groups, signal=signal, dtype=dtype, seed=seed)
    elif num_features:
        signal = WORD_SIGNAL if feature_signal is None else feature_signal
        x = bag_of_words(classes, num_features, groups, density=density, signal=signal, dtype=dtype, seed=seed)
    train, val, test = split_nodes(split, y, seed)
    adj = Adjacency(indptr, indices, symmetric=not directed)
    counts = {"num_classes": num_classes, "num_relations": relations}
    return Graph(adj, x, y, train, val, test, relation, name, **counts)


def degree_limit(num_nodes: int, num_edges: int, max_degree: int | None) -> int:
    """The largest degree to aim for: the given one, by default about ``10 * sqrt(E)``, at most 3/4 N."""
    limit = 3 * (num_nodes - 1) // 4
    mean = -(-num_edges // num_nodes)
    goal = max_degree if max_degree is not None else max(8, 2 * mean, round(10 * num_edges**0.5))
    if max_degree is not None and max_degree * num_nodes < num_edges:
        raise GraphError(f"max_degree={max_degree} is below the mean degree {num_edges / num_nodes:.1f}; raise it")
    return max(1, mean, min(goal, limit))


def _degrees(
    classes: Tensor, num_edges: int, exponent: float, most: int, seed: int, directed: bool
) -> tuple[Tensor, Tensor]:
    """What every node draws ``[N]``, at most ``most``, and the weights by which it is drawn ``[N]``."""
    num_nodes, device = classes.numel(), classes.device
    pairs = num_edges if directed else num_edges // 2
    counts = degree_histogram(num_nodes, pairs, exponent=exponent, max_degree=most)
    degrees = spread_counts(torch.from_numpy(counts).to(device), seed, Stream.DEGREE)
    if not directed:  # drawn in proportion to what it draws
        return degrees, degrees if pairs >= num_nodes else degrees + 1
    spread = OUT_SPREAD * max(1, -(-num_edges // num_nodes))
    counts = degree_histogram(num_nodes, max(num_edges, num_nodes), exponent=OUT_EXPONENT, max_degree=spread)
    weights = spread_counts(torch.from_numpy(counts).to(device), seed, Stream.OUT_DEGREE)
    return degrees, weights
