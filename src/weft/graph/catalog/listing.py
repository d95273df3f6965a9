"""List what can be loaded by name, from tables and folders alone: ``weft data ls`` does without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from weft.core.errors import GraphError
from weft.core.wording import nearest_names
from weft.graph.catalog import shapes
from weft.graph.saved_marker import is_saved

DEMO_SIZES = (2_400, 9_600, 800, 7)
DATA_VARIABLE = "WEFT_DATA"
PLANETOID: Mapping[str, str] = MappingProxyType({"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"})
OGB_ARCHIVES: Mapping[str, str] = MappingProxyType(
    {
        "ogbn-arxiv": "arxiv",
        "ogbn-products": "products",
        "ogbn-proteins": "proteins",
        "ogbn-papers100M": "papers100M-bin",
    }
)
COLLECTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType({"planetoid": PLANETOID, "ogb": OGB_ARCHIVES})


@dataclass(frozen=True)
class Entry:
    """Something that :func:`weft.load` accepts, as far as it is known without loading it."""

    name: str
    kind: str
    num_nodes: int | None = None
    num_edges: int | None = None
    num_features: int | None = None
    num_classes: int | None = None
    note: str = ""


def data_folders(root: str | os.PathLike[str] | None = None) -> list[Path]:
    """Folders that are searched for named graphs, in order; downloads go to the first."""
    chosen = [root, os.environ.get(DATA_VARIABLE) or None]
    folders = [Path(folder).expanduser() for folder in chosen if folder is not None]
    return [*folders, Path("~/.cache/weft/data").expanduser()]


def entries(root: str | os.PathLike[str] | None = None) -> list[Entry]:
    """Everything that can be loaded by name: embedded, in the data folders, generated, downloadable."""
    listed = [Entry("demo", "embedded", *DEMO_SIZES, note="undirected; always there")]
    files: dict[str, Path] = {}
    for folder in data_folders(root):
        for path in _graphs_in(folder):
            files.setdefault(path.stem if path.suffix == ".npz" else path.name, path)
    listed += [Entry(name, "file", note=str(path)) for name, path in files.items()]
    for shape in shapes.SHAPES.values():
        sizes = (shape.num_nodes, shape.num_edges, shape.num_features, shape.num_classes)
        kinds = ["directed" if shape.directed else "undirected"]
        kinds += [f"{shape.relations} relations"] if shape.relations else []
        kinds += ["several labels per node"] if shape.multilabel else []
        listed.append(Entry(f"shape:{shape.name}", "generated", *sizes, note=f"{', '.join(kinds)}; {shape.source}"))
    listed.append(Entry("planted:relations", "generated", note="classes that only the relations of edges tell"))
    listed += [Entry(f"planetoid:{name}", "download", note="through PyG") for name in PLANETOID]
    listed += [Entry(f"ogb:{name}", "download", note="Open Graph Benchmark") for name in OGB_ARCHIVES]
    listed.append(Entry("pyg:DATASET", "download", note="any node dataset of PyG, e.g. pyg:Amazon/Photo"))
    return listed


def prefixed() -> Iterator[tuple[str, str]]:
    """Names that need a kind before them, each with its kind."""
    for kind, names in (("shape:", shapes.SHAPES), ("planetoid:", PLANETOID), ("ogb:", OGB_ARCHIVES)):
        yield from ((kind, name) for name in names)


def check_name(name: str) -> None:
    """Raise :class:`GraphError` for what names no graph: a word, a shape, a dataset of a collection or a path."""
    kind, _, rest = name.partition(":")
    if kind == "shape":
        shapes.find(rest.partition("?")[0])
    elif kind == "planted" and rest.partition("?")[0] != "relations":
        raise GraphError(f"there is no graph {name!r}; planted:relations is the only one planted")
    elif kind in COLLECTIONS:
        check_published(kind, rest)
    elif ":" not in name and ("/" in name or name.startswith(("~", ".")) or name.endswith(".npz")):
        if not os.path.exists(Path(name).expanduser()):
            raise GraphError(f"{Path(name).expanduser()} does not exist; check the path")
    elif name != "demo" and not any(mark in name for mark in "/\\:.~") and not os.path.exists(name):
        folders = data_folders()
        if not found_in(folders, name) and name.lower() not in PLANETOID:
            raise GraphError(unknown_name(name, folders))


def check_published(kind: str, name: str) -> str:
    """``name`` as the collection spells it."""
    names = COLLECTIONS[kind]
    for spelling in names:
        if spelling.lower() == name.lower():
            return spelling
    raise GraphError(f"{kind}:{name} is not one of {', '.join(names)}{nearest_names(name, names)}")


def found_in(folders: list[Path], name: str) -> Path | None:
    """The file or folder of a named graph in the first data folder that has it."""
    paths = (path for folder in folders for path in (folder / f"{name}.npz", folder / name))
    return next((path for path in paths if os.path.exists(path)), None)  # no error for a name that is too long


def unknown_name(name: str, folders: list[Path]) -> str:
    """A sentence on the folders that were searched for ``name``, with the nearest names."""
    searched = ", ".join(str(folder) for folder in folders)
    missing = f"there is no graph {name!r}: neither a path nor {name}.npz in {searched}"
    choices = [f"{kind}{published}" for kind, published in prefixed() if published.lower() == name.lower()]
    if choices:
        return f"{missing}; choose {' or '.join(repr(choice) for choice in choices)}"
    files = [path.stem for folder in folders for path in _graphs_in(folder)]
    names = ("demo", *files, *PLANETOID, *(kind + published for kind, published in prefixed()), *shapes.SHAPES)
    suggestion = nearest_names(name, list(dict.fromkeys(names)))
    return f"{missing}{suggestion}; `weft data ls` lists what can be loaded"


def _graphs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix == ".npz" or is_saved(path))
