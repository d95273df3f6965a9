"""Read graphs from files: ``read(path)`` recognises the format.

| what                       | recognised by                         | options                 |
|----------------------------|---------------------------------------|-------------------------|
| a saved graph              | folder with meta.json                 | verify                  |
| OGB's node-property folder | folder with raw/                      | split, directed, name   |
| numpy archive              | .npz                                  | directed, name          |
| edge list, a line per edge | .csv .tsv .txt .edges .edgelist (.gz) | of ``Graph.from_edges`` |
| edge list                  | .parquet .pq                          | of ``Graph.from_edges`` |
| edges and nodes, any ids   | edges.csv next to nodes.csv, or nodes= | of ``Graph.from_edges`` |
| any other kind of file     | entry point ENDING in weft.readers    | of the plug-in          |
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.core.errors import GraphError
from weft.core.plugins import blame_plugin, load_plugin, plugin_names
from weft.graph import saved as store
from weft.graph.graph import Graph
from weft.graph.readers.node_tables import beside, read_tables
from weft.graph.readers.npz import read_npz
from weft.graph.readers.ogb import read_ogb
from weft.graph.readers.tables import read_parquet, read_text

__all__ = ["is_graph_file", "read", "read_npz", "read_ogb", "read_parquet", "read_text"]

READERS: dict[str, Callable[..., Graph]] = {
    ".npz": read_npz,
    **dict.fromkeys((".csv", ".tsv", ".txt", ".edges", ".edgelist"), read_text),
    **dict.fromkeys((".parquet", ".pq"), read_parquet),
}


def read(path: str | os.PathLike[str], **options: Any) -> Graph:
    """The graph at ``path``, whatever its kind; the options of the kind are passed on."""
    path = Path(path)
    if not path.exists():
        raise GraphError(f"{path} does not exist; check the path")
    ending = _ending(path.name)
    folder = path if path.is_dir() else path.parent if path.name.startswith("edges.") else None
    tables = None if folder is None or (folder / store.META).is_file() else beside(folder, "nodes")
    if path.is_dir() and tables is not None:
        path = beside(path, "edges") or path
        if path.is_dir():
            raise GraphError(f"{tables} has no edges beside it; add edges.csv or edges.parquet")
    if path.is_dir():
        reader = store.open_saved if (path / store.META).is_file() else read_ogb
    elif tables is not None or "nodes" in options:
        reader, options = read_tables, {"nodes": tables, **options}
    elif ending in READERS:
        reader = READERS[ending]
    elif (added := load_plugin("readers", ending.removeprefix("."))) is not None:
        return read_by_plugin(ending.removeprefix("."), added, path, **options)
    else:
        endings = (*READERS, *(f".{name}" for name in plugin_names("readers")))
        raise GraphError(
            f"{path}: {ending or 'no ending'} is not a known kind of graph file; known are a saved folder, "
            f"an OGB folder and {', '.join(endings)} (text also as .gz)"
        )
    takes = set(inspect.signature(reader).parameters)
    if "fields" in takes:
        takes |= set(inspect.signature(Graph.from_edges).parameters) - {"src", "dst"}
    takes -= {"path", "fields"}
    unknown = sorted(set(options) - takes)
    if unknown:
        raise GraphError(f"{path} takes no option {unknown[0]!r}; its options are {', '.join(sorted(takes))}")
    try:
        return reader(path, **options)
    except OSError as error:
        raise GraphError(f"cannot read {path}: {error.strerror or error}") from None
    except GraphError as error:
        if path.name in str(error) or (tables is not None and tables.name in str(error)):
            raise
        path = path if tables is None else path.parent
        raise GraphError(f"{path}: {error}") from None  # a check of arrays, with the file they came from


def read_by_plugin(name: str, reader: Callable[..., Graph], source: str | Path, **options: Any) -> Graph:
    """What ``reader``, the entry point ``name`` in ``weft.readers``, makes of a file, or of a name of its own."""
    with blame_plugin("readers", name):
        graph = reader(source, **options)
    if not isinstance(graph, Graph):
        raise GraphError(f"{source}: reader {name!r} in weft.readers returned a {type(graph).__name__}, no weft.Graph")
    return graph


def is_graph_file(name: str) -> bool:
    """Whether ``name`` ends as a graph file does."""
    return _ending(name) in READERS


def _ending(name: str) -> str:
    return Path(name.lower().removesuffix(".gz")).suffix
