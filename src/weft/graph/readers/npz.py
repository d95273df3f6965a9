"""Read a graph from one numpy archive (.npz, no pickles).

Keys: ``src``, ``dst`` (or ``edge_index [2, E]``); optional ``num_nodes``, ``edge_weight``, ``relation``,
``num_relations``, ``y``, ``train``, ``val``, ``test``, and the features as ``x [N, F]`` or as CSR: ``x_indptr``,
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
from weft.graph.data.graph import Graph
from weft.graph.data.sparse_features import SparseFeatures

SPARSE_KEYS = ("x_indptr", "x_indices", "x_data", "x_shape")
PLAIN_KEYS = ("x", "y", "train", "val", "test", "edge_weight", "relation")


def read_npz(path: str | Path, directed: bool = True, name: str | None = None) -> Graph:
    """The graph of an archive; ``directed=True`` takes the edges as stored."""
    path = Path(path)
    arrays = load_archive(path)
    src, dst = _edges(arrays, path)
    fields = {key: arrays[key] for key in PLAIN_KEYS if key in arrays}
    if "x_indptr" in arrays:
        fields["x"] = _sparse_features(arrays, path)
    fields |= {key: int(arrays[key]) for key in ("num_nodes", "num_relations") if key in arrays}
    return Graph.from_edges(src, dst, **fields, directed=directed, name=name or path.stem)


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
