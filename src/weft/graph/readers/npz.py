"""Read a graph from one numpy archive (.npz, no pickles).

Keys: ``src``, ``dst`` (or ``edge_index [2, E]``); optional ``num_nodes``, ``edge_weight``, ``relation``,
``num_relations``, ``edge_attr``, ``y``, ``train``, ``val``, ``test`` (ids or masks) or ``train_mask``, ``val_mask``,
``test_mask`` (``[N]``, or ``[N, S]`` of several splits), and the features as ``x [N, F]`` or as CSR: ``x_indptr``,
``x_indices``, ``x_data``, ``x_shape``.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

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
    if "src" in arrays and "dst" in arrays:
        src, dst = arrays["src"], arrays["dst"]
    elif "edge_index" in arrays and arrays["edge_index"].ndim == 2 and len(arrays["edge_index"]) == 2:
        src, dst = arrays["edge_index"]
    else:
        raise GraphError(f"{path} has no 'src' and 'dst' (nor 'edge_index' [2, E]) among its keys {sorted(arrays)}")
    fields = {key: arrays[key] for key in PLAIN_KEYS if key in arrays}
    for split in SPLITS:
        mask = arrays.get(f"{split}_mask")
        if mask is None:
            continue
        if split in arrays:
            raise GraphError(f"{path} has both {split!r} and '{split}_mask'; keep one of the two")
        if mask.dtype != bool and not np.isin(mask, (0, 1)).all():
            raise GraphError(f"{path}: {split}_mask holds other numbers than 0 and 1; save booleans")
        fields[split] = mask.astype(bool)
    if "x_indptr" in arrays:
        missing = [key for key in SPARSE_KEYS if key not in arrays]
        if missing:
            raise GraphError(f"{path} has x_indptr but lacks {', '.join(missing)}; sparse features need all four")
        indptr, indices, data, shape = (arrays[key] for key in SPARSE_KEYS)
        if shape.shape != (2,):
            raise GraphError(f"{path}: x_shape has shape {list(shape.shape)}; give (nodes, features)")
        fields["x"] = SparseFeatures.from_csr(indptr, indices, data, (int(shape[0]), int(shape[1])))
    fields |= {key: int(arrays[key]) for key in ("num_nodes", "num_relations") if key in arrays}
    graph = Graph.from_edges(src, dst, **fields, directed=directed, name=name or path.stem)
    unread = sorted(arrays.keys() - KNOWN_KEYS)
    return graph.noted(f"{path.name}: not read: {', '.join(unread)}") if unread else graph


def load_archive(path: Path) -> dict[str, np.ndarray]:
    """Every array of an archive; a truncated or foreign file is one clear error."""
    arrays: dict[str, np.ndarray] = {}
    key = ""
    try:
        # Opened here, because numpy leaves a file it cannot read open.
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise zipfile.BadZipFile("it is not a zip file of arrays")
            file.seek(0)
            archive = np.load(file, allow_pickle=False)
            for key in archive.files:
                arrays[key] = archive[key]
            return arrays
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        if "allow_pickle" in str(error):
            raise GraphError(f"{path}: {key} holds Python objects, which are never loaded; save numbers") from None
        raise GraphError(
            f"{path} ({path.stat().st_size} bytes) is not a readable npz archive: "
            f"{error or 'it ends too early'}; it may be truncated, fetch or write it again"
        ) from None
