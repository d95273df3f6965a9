"""Read OGB's folder of a node-property dataset, as its archives unpack.

    raw/edge.csv.gz, num-node-list.csv.gz, node-feat.csv.gz, node-label.csv.gz     the text layout
    raw/data.npz (edge_index, node_feat, num_nodes_list), node-label.npz           the binary layout
    split/<scheme>/train.csv.gz, valid.csv.gz, test.csv.gz

Node years, species and edge features are not read; the graph's notes name their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import GraphError
from weft.graph.graph import Graph
from weft.graph.readers.npz import load_archive
from weft.graph.readers.tables import load_table

SPLIT_FILES = {"train": "train", "val": "valid", "test": "test"}
READ = {
    *("edge.csv.gz", "num-edge-list.csv.gz", "num-node-list.csv.gz", "node-feat.csv.gz", "node-label.csv.gz"),
    *("data.npz", "node-label.npz"),
}
# OGB stores these with one direction of every edge and adds the other when it loads them.
ONE_WAY = ("products", "proteins")
COUNTED = ("edge", "num-edge-list", "num-node-list")


def read_ogb(
    path: str | Path, split: str | None = None, directed: bool | None = None, name: str | None = None
) -> Graph:
    """The graph of an OGB folder.

    ``split`` names the scheme if there are several. ``directed=None`` is what OGB's own loader does: the
    reverse edges are added for products and proteins, other graphs are taken as stored.
    """
    path = Path(path)
    raw = path / "raw"
    if not raw.is_dir():
        raise GraphError(f"{path} is a folder with neither meta.json (a saved graph) nor raw/ (an OGB dataset)")
    if (raw / "triplet-type-list.csv.gz").exists() or (raw / "relations").exists():
        raise GraphError(f"{path} is an OGB graph with several node types; only those with one are read")
    if directed is None:
        directed = not any(word in path.name for word in ONE_WAY)
    if (raw / "data.npz").exists():
        data, labels = load_archive(raw / "data.npz"), raw / "node-label.npz"
        src, dst = _key(data, "edge_index", raw / "data.npz")
        nodes, x = _key(data, "num_nodes_list", raw / "data.npz"), data.get("node_feat")
        y = _key(load_archive(labels), "node_label", labels) if labels.exists() else None
    else:
        edges, declared, nodes = (_table(_required(raw, f"{name}.csv.gz"), np.int64) for name in COUNTED)
        edges = edges.reshape(-1, 2) if not edges.size else edges
        if edges.shape != (int(declared.sum()), 2):
            raise GraphError(
                f"{raw / 'edge.csv.gz'} holds {list(edges.shape)} values but num-edge-list.csv.gz says "
                f"{int(declared.sum())} edges of 2 ends; fetch the dataset again"
            )
        src, dst, features, labels = edges[:, 0], edges[:, 1], raw / "node-feat.csv.gz", raw / "node-label.csv.gz"
        x = _table(features, np.float32) if features.exists() else None
        y = _table(labels, np.float64) if labels.exists() else None
    if y is not None and y.dtype.kind == "f":  # NaN marks a node without a label
        several = y.ndim == 2 and y.shape[1] > 1
        y = y.astype(np.float32) if several else np.where(np.isnan(y), -1, y).astype(np.int64)
    fields = {"src": src, "dst": dst, "num_nodes": int(np.sum(nodes)), "x": x, "y": y}
    splits = _splits(path / "split", split)
    graph = Graph.from_edges(**fields, **splits, directed=directed, name=name or path.name)
    unread = sorted(file.name for file in raw.iterdir() if file.name not in READ)
    return graph.noted(f"{path.name}: not read: {', '.join(unread)}") if unread else graph


def _key(arrays: Mapping[str, np.ndarray], key: str, path: Path) -> np.ndarray:
    if key not in arrays:
        raise GraphError(f"{path} has no {key!r} among its keys {sorted(arrays)}")
    return arrays[key]


def _splits(folder: Path, scheme: str | None) -> dict[str, np.ndarray]:
    schemes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    if scheme is None and len(schemes) > 1:
        raise GraphError(f"{folder} has several schemes, {', '.join(schemes)}; choose one with split=")
    if scheme is not None and scheme not in schemes:
        raise GraphError(f"split={scheme!r} is not in {folder}; it has {', '.join(schemes) or 'none'}")
    if not schemes:
        return {}
    chosen = folder / (scheme or schemes[0])
    return {
        name: _table(_required(chosen, f"{file}.csv.gz"), np.int64).reshape(-1) for name, file in SPLIT_FILES.items()
    }


def _required(folder: Path, name: str) -> Path:
    if not (folder / name).exists():
        raise GraphError(f"{folder / name} is missing; the OGB folder is incomplete, fetch it again")
    return folder / name


def _table(path: Path, dtype: Any) -> np.ndarray:
    try:
        return load_table(path, dtype, delimiter=",", ndmin=2)
    except ValueError as error:
        raise GraphError(f"{path} is not a table of numbers: {error}") from None
