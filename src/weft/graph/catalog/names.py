"""Load any graph by name: ``load("demo")``, ``load("shape:reddit?scale=0.1")``, ``load("my/folder")``.

| name                                             | what it is                                                |
|--------------------------------------------------|-----------------------------------------------------------|
| ``demo``                                         | the small graph inside the package                        |
| a path (has a separator, or exists)              | a saved folder or any file that is read                   |
| ``NAME`` with NAME.npz or NAME/ in a data folder | that file; folders: ``root``, $WEFT_DATA, ~/.cache/weft/data |
| ``shape:NAME``, ``shape:NAME?scale=0.1&seed=3``  | generated: :mod:`weft.graph.catalog.shapes`                       |
| ``planted:relations``, ``planted:relations?nodes=500&seed=3`` | generated: classes that only relations tell  |
| ``planetoid:cora``, ``ogb:ogbn-arxiv``, ``pyg:Reddit``, ``pyg:Amazon/Photo`` | downloaded once               |
| ``READER:NAME``                                  | what the entry point READER in ``weft.readers`` makes of NAME |
| ``cora``, ``citeseer``, ``pubmed``               | the data folder, else ``planetoid:``                      |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch

from weft.core.errors import GraphError, SpecError
from weft.core.graph_stats import GraphStats
from weft.core.plugins import load_plugin
from weft.core.task import GRAPHS
from weft.core.wording import brief
from weft.graph import readers
from weft.graph.catalog import datasets, shapes
from weft.graph.catalog.listing import check_name, data_folders, found_in, unknown_name
from weft.graph.catalog.shapes import Shape
from weft.graph.graph import Graph, as_graph
from weft.graph.split_rules import PER_CLASS, PLANETOID, PLANETOID_TEST, PLANETOID_VAL

DEMO = Path(__file__).parents[1] / "embedded" / "demo.npz"
PLANTED_NODES, PLANTED_CLASSES = 1_000, 4

FETCHERS: Mapping[str, Callable[[str, Path], Graph]] = MappingProxyType(
    {"planetoid": datasets.planetoid, "ogb": datasets.ogb, "pyg": datasets.pyg}
)


def load(
    graph: Any,
    /,
    *,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **reading: Any,
) -> Graph:
    """The graph of a name, a path, or a ``Data`` or dataset of PyG, on a device.

    ``root``: a data folder to look in first. ``seed`` counts for generated graphs only. ``reading``: options of the
    reader of a file, such as ``directed=False`` (:func:`weft.graph.readers.read`).
    """
    if not isinstance(graph, (str, os.PathLike)):
        given = as_graph(graph)
        if given is None or reading:
            raise SpecError(f"graph={brief(graph)} must be {GRAPHS} (see weft.Graph.from_edges)")
        return given.to(device)
    text = os.fspath(graph)
    kind, colon, rest = text.partition(":")
    named = text == "demo" or (colon and kind in ("shape", "planted", *FETCHERS))
    path_like = any(mark in text for mark in ("/", os.sep)) or text.startswith(("~", "."))
    is_file = not named and (path_like or readers.is_graph_file(text) or os.path.exists(text))
    if reading and not is_file:
        raise GraphError(f"weft.load({text!r}): {next(iter(reading))}= is read with files only; leave it out")
    if text == "demo":
        return readers.read(DEMO, name="demo").to(device)
    if colon and kind == "shape":
        shape, options = _options(text, {"seed": seed, "scale": 1.0})
        return shapes.make(
            shape.removeprefix("shape:"), seed=int(options["seed"]), scale=options["scale"], device=device
        )
    if colon and kind == "planted":
        planted, options = _options(text, {"seed": seed, "nodes": PLANTED_NODES})
        check_name(planted)
        from weft.graph.generate import planted_relations

        return planted_relations(int(options["nodes"]), PLANTED_CLASSES, seed=int(options["seed"]), device=device)
    if (
        kind.isidentifier()
        and colon
        and not os.path.exists(text)
        and (added := load_plugin("readers", kind)) is not None
    ):
        return readers.read_by_plugin(kind, added, rest).to(device)
    folders = data_folders(root)
    if colon and kind in FETCHERS:
        return FETCHERS[kind](rest, folders[0]).to(device)
    if is_file:
        return readers.read(Path(text).expanduser(), **reading).to(device)
    path = found_in(folders, text)
    if path is not None:
        return readers.read(path).to(device)
    if text.lower() in datasets.PLANETOID:
        return datasets.planetoid(text, folders[0]).to(device)
    raise GraphError(unknown_name(text, folders))


def stats(name: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None) -> GraphStats:
    """The summary of the graph that :func:`load` would give; a shape's comes from its table, nothing is generated."""
    text = os.fspath(name)
    if not text.startswith("shape:"):
        return load(name, root=root).stats()
    shape, options = _options(text, {"seed": 0, "scale": 1.0})
    return shape_stats(shapes.scaled(shapes.find(shape.removeprefix("shape:")), options["scale"]))


def _options(text: str, defaults: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """The name before the question mark, and the numbers behind it over their defaults."""
    name, _, query = text.partition("?")
    options = dict(defaults)
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in options:
            takes = " and ".join(sorted(options))
            kind = "shape" if name.startswith("shape:") else "planted graph"
            raise GraphError(f"{text}: there is no option {key!r}; a {kind} takes {takes}")
        whole = isinstance(options[key], int)
        try:
            options[key] = int(value) if whole else float(value)
        except ValueError:
            raise GraphError(f"{text}: {key}={value!r} is not {'an integer' if whole else 'a number'}") from None
    return name, options


def shape_stats(shape: Shape) -> GraphStats:
    """What ``shapes.make`` would summarise to, up to the scatter of degrees and words (about a per cent)."""
    from weft.graph.generate.citation import degree_limit, split_sizes
    from weft.graph.generate.wiring import degree_histogram, relation_shares

    nodes, edges = shape.num_nodes, shape.num_edges if shape.directed else shape.num_edges // 2 * 2
    top = degree_limit(nodes, edges, shape.max_degree)
    counts = degree_histogram(nodes, edges, exponent=shape.exponent, max_degree=top)  # nodes per degree
    bit_lengths = [0, *(1 << length for length in range(int(counts.size - 1).bit_length()))]
    relation_edges, relation_rows = (), 0
    if shape.relations:
        shares, degrees = relation_shares(shape.relations), np.flatnonzero(counts)
        relation_edges = tuple(np.rint(shares * edges).astype(int).tolist())
        missed = (1.0 - shares)[:, None] ** degrees  # probability that a node has no in-edge of a relation
        relation_rows = int(((1.0 - missed).sum(0) * counts[degrees]).sum())
    if shape.split == PLANETOID:
        train = shape.num_classes * max(1, min(PER_CLASS, nodes // (4 * shape.num_classes)))
        val = min(PLANETOID_VAL, (nodes - train) // 3)
        test = min(PLANETOID_TEST, nodes - train - val)
    else:
        train, val, test = split_sizes(shape.split, nodes)
    return GraphStats(
        name=shape.name,
        num_nodes=nodes,
        num_edges=edges,
        num_features=shape.num_features,
        feature_nnz=None if shape.density is None else nodes * max(1, round(shape.density * shape.num_features)),
        feature_dtype=shape.dtype,
        num_classes=shape.num_classes,
        multilabel=shape.multilabel,
        symmetric=not shape.directed,
        num_relations=shape.relations,
        relation_edges=relation_edges,
        relation_rows=relation_rows,
        max_degree=top,
        degree_histogram=tuple(np.add.reduceat(counts, bit_lengths).tolist()),
        num_train=train,
        num_val=val,
        num_test=test,
    )
