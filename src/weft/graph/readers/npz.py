"""Read a graph from one numpy archive (.npz, no pickles).

Keys: ``src``, ``dst`` (or ``edge_index [2, E]``); optional ``num_nodes``, ``edge_weight``, ``relation``,
``num_relations``, ``edge_attr``, ``y``, ``train``, ``val``, ``test`` (ids or masks) or ``train_mask``, ``val_mask``,
``test_mask`` (``[N]``, or ``[N, S]`` of several splits), and the features as ``x [N, F]`` or as CSR: ``x_indptr``,
``x_indices``, ``x_data``, ``x_shape``.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import GraphError
from weft.graph.graph import Graph
from weft.graph.labels import SPLITS
from weft.graph.sparse_features import SparseFeatures

SPARSE_KEYS = ("x_indptr", "x_indices", "x_data", "x_shape")
PLAIN_KEYS = ("x", "y", "train", "val", "test", "edge_weight", "edge_attr", "relation")
KNOWN_KEYS = {
    *("src", "dst", "edge_index", "num_nodes", "num_relations"),
    *PLAIN_KEYS,
    *SPARSE_KEYS,
    *(f"{name}_mask" for name in SPLITS),
}


def read_npz(path: str | Path, directed: bool = True, name: str | None = None) -> Graph:
    """The graph of an archive; ``directed=True`` takes the edges as stored."""
    path = Path(path)
    arrays = load_archive(path)
    src, dst = _edges(arrays, path)
    fields = {key: arrays[key] for key in PLAIN_KEYS if key in arrays}
    fields |= {name: _mask(arrays, name, path) for name in SPLITS if f"{name}_mask" in arrays}
    if "x_indptr" in arrays:
        fields["x"] = _sparse_features(arrays, path)
    fields |= {key: int(arrays[key]) for key in ("num_nodes", "num_relations") if key in arrays}
    graph = Graph.from_edges(src, dst, **fields, directed=directed, name=name or path.stem)
    unread = sorted(arrays.keys() - KNOWN_KEYS)
    return graph.noted(f"{path.name}: not read: {', '.join(unread)}") if unread else graph


def _mask(arrays: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    """``train_mask``, ``[N]`` or ``[N, S]`` for several splits, of booleans or 0 and 1."""
    mask = arrays[f"{name}_mask"]
    if name in arrays:
        raise GraphError(f"{path} has both {name!r} and '{name}_mask'; keep one of the two")
    if mask.dtype != bool and not np.isin(mask, (0, 1)).all():
        raise GraphError(f"{path}: {name}_mask holds other numbers than 0 and 1; save booleans")
    return mask.astype(bool)


def load_archive(path: Path) -> dict[str, np.ndarray]:
    """Every array of an archive; a truncated or foreign file is one clear error."""
    try:
        # Opened here, because numpy leaves a file it cannot read open.
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise zipfile.BadZipFile("it is not a zip file of arrays")
            file.seek(0)
            archive = np.load(file, allow_pickle=False)
            return {key: _plain(archive, key, path) for key in archive.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise GraphError(
            f"{path} ({path.stat().st_size} bytes) is not a readable npz archive: "
            f"{error or 'it ends too early'}; it may be truncated, fetch or write it again"
        ) from None


def _plain(archive: np.lib.npyio.NpzFile, key: str, path: Path) -> np.ndarray:
    try:
        return archive[key]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise GraphError(f"{path}: {key} holds Python objects, which are never loaded; save numbers") from None


def _edges(arrays: Mapping[str, np.ndarray], path: Path) -> tuple[Any, Any]:
    if "src" in arrays and "dst" in arrays:
        return arrays["src"], arrays["dst"]
    if "edge_index" in arrays and arrays["edge_index"].ndim == 2 and len(arrays["edge_index"]) == 2:
        return arrays["edge_index"][0], arrays["edge_index"][1]
    raise GraphError(f"{path} has no 'src' and 'dst' (nor 'edge_index' [2, E]) among its keys {sorted(arrays)}")


def _sparse_features(arrays: Mapping[str, np.ndarray], path: Path) -> SparseFeatures:
    missing = [key for key in SPARSE_KEYS if key not in arrays]
    if missing:
        raise GraphError(f"{path} has x_indptr but lacks {', '.join(missing)}; sparse features need all four")
    indptr, indices, data, shape = (arrays[key] for key in SPARSE_KEYS)
    if shape.shape != (2,):
        raise GraphError(f"{path}: x_shape has shape {list(shape.shape)}; give (nodes, features)")
    return SparseFeatures.from_csr(indptr, indices, data, (int(shape[0]), int(shape[1])))
