"""Named shapes: generated stand-ins with the size, skew and difficulty of well-known graphs.

A shape fixes nodes, stored entries, features, classes, relations and split sizes to those of the real graph;
everything else is planted (:func:`weft.graph.generate.citation`). Undirected graphs store both directions and
their entries are exact for even counts; two odd counts of a table (soc-blog, amazon0601) are one entry less.

Where the figures come from:

- cora ... ovcar-8h: CoGNN (Sun et al.), Table IV, whose #Edge is read as stored entries.
- reddit, enwiki, orkut, ogbn-proteins: MGG (Wang et al.), Table 3, #Dim and #Class included. The #Edge of reddit
  and enwiki are stored entries; the 117,185,083 of orkut and the 39,561,252 of ogbn-proteins are undirected
  edges, so twice as many entries are stored. ogbn-proteins has 112 yes/no labels per node.
- ogbn-arxiv, ogbn-products, ogbn-papers100M: the Open Graph Benchmark (Hu et al.). arxiv is stored
  undirected here, 2 x 1,166,243 entries, as it is trained on (``ogbn-arxiv-directed`` is as published); products
  stores 2 x 61,859,140; papers100M is directed, with half-precision features.
- bgs, am: TurboGNN (Wu et al., workload configuration): nodes, edges, 96 relations. The originals have no
  features; these have 64, and the 2 and 11 classes of the RDF data sets.

Split sizes of the OGB graphs and of reddit are the published ones; cora, citeseer and pubmed are split as by
Planetoid; the others 60/20/20. ``max_degree`` is measured for cora and citeseer, a rounded public figure for
pubmed, artist, soc-blog, amazon0601, reddit and the OGB and MGG graphs, and chosen for the rest (molecules and
proteins have a few bonds per node). Homophily and feature signal are chosen so that a two-layer GCN clearly beats
an MLP and neither is perfect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from weft.core.errors import GraphError
from weft.core.wording import nearest_names
from weft.graph.split_rules import PLANETOID, SHARES, SplitRule

if TYPE_CHECKING:
    import torch

    from weft.graph.graph import Graph


@dataclass(frozen=True)
class Shape:
    """What a generated stand-in copies of a graph: ``num_edges`` counts stored entries."""

    name: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    source: str
    max_degree: int
    exponent: float = 2.5
    homophily: float = 0.7
    feature_signal: float | None = None
    density: float | None = None
    label_noise: float = 0.05
    directed: bool = False
    relations: int = 0
    multilabel: bool = False
    split: SplitRule = SHARES
    dtype: str = "float32"


def _small_bonds(name: str, nodes: int, edges: int, features: int, max_degree: int) -> Shape:
    """A union of molecules or proteins: hardly any skew, so neighbours must agree for them to help."""
    return Shape(name, nodes, edges, features, 2, "CoGNN Table IV", max_degree, 3.5, homophily=0.85, feature_signal=1.2)


def _words(name: str, nodes: int, edges: int, features: int, classes: int, degree: int, **more: float) -> Shape:
    """A citation network with bag-of-words features and Planetoid's split."""
    return Shape(name, nodes, edges, features, classes, "CoGNN Table IV", degree, 2.8, split=PLANETOID, **more)


_TABLE = (
    _words("cora", 2_708, 10_858, 1_433, 7, 168, homophily=0.81, feature_signal=0.25, density=0.0127),
    _words("citeseer", 3_327, 9_464, 3_703, 6, 99, homophily=0.74, feature_signal=0.25, density=0.0085),
    _words("pubmed", 19_717, 88_676, 500, 3, 171, homophily=0.80, feature_signal=0.12, density=0.1),
    _small_bonds("proteins", 43_471, 162_088, 29, 25),
    Shape("artist", 50_515, 1_638_396, 100, 12, "CoGNN Table IV", 1_500),
    Shape("soc-blog", 88_784, 2_093_194, 128, 39, "CoGNN Table IV", 9_400, 2.2),
    _small_bonds("dd", 334_925, 1_686_092, 98, 20),
    Shape("amazon0601", 410_236, 4_878_874, 96, 22, "CoGNN Table IV", 2_750, 3.0),
    _small_bonds("twitter", 580_768, 1_435_116, 1_323, 32),
    _small_bonds("yeast", 1_714_644, 3_636_546, 74, 6),
    _small_bonds("ovcar-8h", 1_890_931, 3_946_402, 66, 6),
    Shape(
        "reddit", 232_965, 114_615_892, 602, 41, "MGG Table 3", 21_657, 2.3, split=(153_431, 23_831, 55_703)
    ),
    Shape("enwiki", 4_203_323, 202_623_226, 96, 128, "MGG Table 3", 430_000, 2.2),
    Shape(
        "ogbn-proteins", 132_534, 79_122_504, 128, 112, "MGG Table 3", 7_750, 2.5, homophily=0.5,
        multilabel=True, split=(86_619, 21_236, 24_679),
    ),
    Shape("orkut", 3_072_441, 234_370_166, 128, 32, "MGG Table 3", 33_000, 2.4),
    Shape(
        "ogbn-arxiv", 169_343, 2_332_486, 128, 40, "OGB", 13_100, 2.5, homophily=0.65, label_noise=0.15,
        split=(90_941, 29_799, 48_603),
    ),
    Shape(
        "ogbn-arxiv-directed", 169_343, 1_166_243, 128, 40, "OGB", 13_100, 2.3, homophily=0.65,
        label_noise=0.15, directed=True, split=(90_941, 29_799, 48_603),
    ),
    Shape(
        "ogbn-products", 2_449_029, 123_718_280, 100, 47, "OGB", 17_500, 2.4, homophily=0.8,
        split=(196_615, 39_323, 2_213_091),
    ),
    Shape(
        "ogbn-papers100M", 111_059_956, 1_615_685_872, 128, 172, "OGB", 250_000, 2.4, homophily=0.6,
        directed=True, split=(1_207_179, 125_265, 214_338), dtype="float16",
    ),
    Shape("bgs", 94_806, 672_884, 64, 2, "TurboGNN", 20_000, 2.2, directed=True, relations=96),
    Shape("am", 881_680, 5_668_682, 64, 11, "TurboGNN", 100_000, 2.2, directed=True, relations=96),
)  # fmt: skip

OWN = ("source", "dtype")  # what the generator does not take as it is
SHAPES: Mapping[str, Shape] = MappingProxyType({shape.name: shape for shape in _TABLE})


def find(name: str) -> Shape:
    """The shape of that name (letter case does not count)."""
    for shape in SHAPES.values():
        if shape.name.lower() == name.lower():
            return shape
    raise GraphError(f"there is no shape {name!r}{nearest_names(name, SHAPES)}; `weft data ls` lists them")


def make(
    name: str,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Graph:
    """The graph of a named shape; ``scale=0.1`` makes a tenth of the nodes with the same average degree.

    A seed gives the same graph on every device. ``dtype`` is that of the features.
    """
    import torch  # the table can do without

    from weft.graph.generate.citation import citation

    shape = scaled(find(name), scale)
    copied = {entry.name: getattr(shape, entry.name) for entry in fields(shape) if entry.name not in OWN}
    dtype = getattr(torch, shape.dtype) if dtype is None else dtype
    return citation(**copied, seed=seed, dtype=dtype, device=device)


def scaled(shape: Shape, scale: float) -> Shape:
    """The shape with ``scale`` times the nodes: equal average degree, hubs shrunk as a power law's would."""
    if scale == 1.0:
        return shape
    nodes = max(4.0 * shape.num_edges / shape.num_nodes, 4.0 * shape.num_classes, 16.0)
    smallest = nodes / shape.num_nodes
    if not smallest <= scale < float("inf"):
        raise GraphError(
            f"scale={scale} is too small for the shape {shape.name!r}, whose average degree and classes need "
            f"more nodes; give at least scale={smallest:.2g}"
        )
    num_nodes, num_edges = round(shape.num_nodes * scale), round(shape.num_edges * scale)
    hub = round(shape.max_degree * min(1.0, scale) ** (1.0 / (shape.exponent - 1.0)))
    split = shape.split
    if isinstance(split, tuple) and isinstance(split[0], int):
        split = tuple(size / shape.num_nodes for size in split)
    return replace(
        shape,
        name=f"{shape.name}?scale={scale:g}",
        num_nodes=num_nodes,
        num_edges=num_edges if shape.directed else num_edges // 2 * 2,
        max_degree=max(hub, min(shape.max_degree, 2 * -(-num_edges // num_nodes))),
        split=split,
    )
