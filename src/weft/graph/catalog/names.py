"""Load any graph by name: ``load("demo")``, ``load("shape:reddit?scale=0.1")``, ``load("my/folder")``.

| name                                             | what it is                                                |
|--------------------------------------------------|-----------------------------------------------------------|
| ``demo``                                         | the small graph inside the package                        |
| a path (has a separator, or exists)              | a saved folder or any file that is read                   |
| ``NAME`` with NAME.npz or NAME/ in a data folder | that file; folders: ``root``, $WEFT_DATA, ~/.cache/weft/data |
| ``shape:NAME``, ``shape:NAME?scale=0.1&seed=3``  | generated: :mod:`weft.graph.catalog.shapes`                       |
| ``planted:relations``, ``planted:relations?nodes=500&seed=3`` | generated: classes that only relations tell  |
| ``planetoid:cora``, ``ogb:ogbn-arxiv``, ``pyg:Reddit``, ``pyg:Amazon/Photo`` | downloaded once               |
| ``cora``, ``citeseer``, ``pubmed``               | the data folder, else ``planetoid:``                      |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qsl

import numpy as np
import torch

from weft.core.errors import GraphError
from weft.core.graph_stats import GraphStats
from weft.graph import readers
from weft.graph.catalog import datasets, shapes
from weft.graph.catalog.listing import data_folders, found_in, unknown_name
from weft.graph.catalog.shapes import Shape
from weft.graph.generate.citation import degree_limit, split_sizes
from weft.graph.generate.wiring import degree_histogram, relation_shares, relation_sizes
from weft.graph.graph import Graph
from weft.graph.split_rules import PER_CLASS, PLANETOID, PLANETOID_TEST, PLANETOID_VAL

DEMO = Path(__file__).parents[1] / "embedded" / "demo.npz"
PLANTED, PLANTED_NODES, PLANTED_CLASSES = "planted", 1_000, 4

FETCHERS: Mapping[str, Callable[[str, Path], Graph]] = MappingProxyType(
    {"planetoid": datasets.planetoid, "ogb": datasets.ogb, "pyg": datasets.pyg}
)


def load(
    name: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Graph:
    """The graph of a name or a path, on a device; ``root`` is a data folder to look in first.

    ``seed`` counts for generated graphs only.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise GraphError(f"weft.load takes the name or path of a graph, such as 'demo', not {name!r}")
    text = os.fspath(name)
    kind, colon, rest = text.partition(":")
    if text == "demo":
        return readers.read(DEMO, name="demo").to(device)
    if colon and kind == "shape":
        return _shape(rest, seed, device)
    if colon and kind == PLANTED:
        return _planted(rest, seed, device)
    if colon and kind in FETCHERS:
        return FETCHERS[kind](rest, data_folders(root)[0]).to(device)
    if _looks_like_path(text):
        return readers.read(Path(text).expanduser()).to(device)
    return _named(text, root).to(device)


def _looks_like_path(text: str) -> bool:
    marked = any(mark in text for mark in ("/", os.sep)) or text.startswith(("~", "."))
    return marked or readers.is_graph_file(text) or os.path.exists(text)


def stats(name: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None) -> GraphStats:
    """The summary of the graph that :func:`load` would give; a shape's comes from its table, nothing is generated."""
    kind, _, rest = os.fspath(name).partition(":")
    if kind != "shape":
        return load(name, root=root).stats()

    shape, options = _shape_options(rest, 0)
    return shape_stats(shapes.scaled(shapes.find(shape), options["scale"]))


def _shape(rest: str, seed: int, device: torch.device | str) -> Graph:
    name, options = _shape_options(rest, seed)
    return shapes.make(name, seed=int(options["seed"]), scale=options["scale"], device=device)


def _planted(rest: str, seed: int, device: torch.device | str) -> Graph:
    name, options = _options(f"{PLANTED}:{rest}", {"seed": seed, "nodes": PLANTED_NODES})
    if name != f"{PLANTED}:relations":
        raise GraphError(f"there is no graph {name!r}; planted:relations is the only one planted")
    from weft.graph.generate import planted_relations

    return planted_relations(int(options["nodes"]), PLANTED_CLASSES, seed=int(options["seed"]), device=device)


def _shape_options(rest: str, seed: int) -> tuple[str, dict[str, float]]:
    """``NAME?scale=0.1&seed=3``."""
    name, options = _options(f"shape:{rest}", {"seed": seed, "scale": 1.0})
    return name.removeprefix("shape:"), options


def _options(text: str, defaults: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """The name before the question mark, and the numbers behind it over their defaults."""
    name, _, query = text.partition("?")
    options = dict(defaults)
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in options:
            takes = " and ".join(sorted(options))
            kind = "shape" if name.startswith("shape:") else "planted graph"
            raise GraphError(f"{text}: there is no option {key!r}; a {kind} takes {takes}")
        options[key] = _number(value, key, text, whole=isinstance(options[key], int))
    return name, options


def _number(value: str, key: str, text: str, *, whole: bool) -> float:
    try:
        return int(value) if whole else float(value)
    except ValueError:
        raise GraphError(f"{text}: {key}={value!r} is not {'an integer' if whole else 'a number'}") from None


def _named(name: str, root: str | os.PathLike[str] | None) -> Graph:
    folders = data_folders(root)
    place = found_in(folders, name)
    if place is not None:
        return readers.read(place)
    if name.lower() in datasets.PLANETOID:
        return datasets.planetoid(name, folders[0])
    raise GraphError(unknown_name(name, folders))


# ---- Summarise a named shape from its table alone, without generating it.


def shape_stats(shape: Shape) -> GraphStats:
    """What ``shapes.make`` would summarise to, up to the scatter of degrees and words (about a per cent)."""
    edges = shape.num_edges if shape.directed else shape.num_edges // 2 * 2
    top = degree_limit(shape.num_nodes, edges, shape.max_degree)
    counts = degree_histogram(shape.num_nodes, edges, exponent=shape.exponent, max_degree=top)
    train, val, test = _split_sizes(shape)
    return GraphStats(
        name=shape.name,
        num_nodes=shape.num_nodes,
        num_edges=edges,
        num_features=shape.num_features,
        feature_nnz=_words(shape),
        feature_dtype=shape.dtype,
        num_classes=shape.num_classes,
        multilabel=shape.multilabel,
        symmetric=not shape.directed,
        num_relations=shape.relations,
        relation_edges=relation_sizes(shape.relations, edges),
        relation_rows=_relation_rows(shape, counts),
        max_degree=top,
        degree_histogram=_by_bit_length(counts),
        num_train=train,
        num_val=val,
        num_test=test,
    )


def _relation_rows(shape: Shape, counts: np.ndarray) -> int:
    """Pairs of a node and a relation that it has an in-edge of, from the nodes per degree; about a per cent off."""
    if not shape.relations:
        return 0
    degrees = np.flatnonzero(counts)
    missed = (1.0 - relation_shares(shape.relations))[:, None] ** degrees
    return int(((1.0 - missed).sum(0) * counts[degrees]).sum())


def _words(shape: Shape) -> int | None:
    if shape.density is None:
        return None
    return shape.num_nodes * max(1, round(shape.density * shape.num_features))


def _by_bit_length(counts: np.ndarray) -> tuple[int, ...]:
    """Nodes per degree ``[max + 1]`` as nodes per bit length of the degree."""
    edges = [0, *(1 << length for length in range(int(counts.size - 1).bit_length()))]
    return tuple(np.add.reduceat(counts, edges).tolist())


def _split_sizes(shape: Shape) -> list[int]:
    if shape.split != PLANETOID:
        return split_sizes(shape.split, shape.num_nodes)
    train = shape.num_classes * max(1, min(PER_CLASS, shape.num_nodes // (4 * shape.num_classes)))
    rest = shape.num_nodes - train
    val = min(PLANETOID_VAL, rest // 3)
    return [train, val, min(PLANETOID_TEST, rest - val)]
