"""Save a graph as a folder of arrays and open it memory-mapped: a 100 GB graph opens at once.

    <folder>/meta.json      format, version, sizes, flags, summary, dtype and shape of every array
    <folder>/<array>.npy    little-endian, C order: indptr, indices, weight, relation, edge_attr, x (or x_indptr,
                            x_indices, x_values), y, train, val, test (train_1, val_1, ... of further
                            splits); only those the graph has

A folder is written under another name in the same parent folder and then renamed, so it is whole or absent.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.core.files import write_json
from weft.core.graph_stats import GraphStats
from weft.core.plain_data import PlainData
from weft.graph.check import dtype_name
from weft.graph.graph import Graph
from weft.graph.labels import SPLITS, Split
from weft.graph.saved_marker import FORMAT, META, is_saved
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency

BLOCK_BYTES = 2**26
# numpy has no bfloat16: its bits are kept as int16.
NUMPY_TYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<i2", "float64": "<f8", "int32": "<i4", "int64": "<i8"}


@dataclass(frozen=True)
class ArraySpec(PlainData):
    """Type and shape of a stored tensor, as the description of the graph keeps them."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy(self) -> np.dtype:
        """The numpy type of the file."""
        return np.dtype(NUMPY_TYPES[self.dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of the values alone."""
        return math.prod(self.shape) * self.numpy.itemsize


def write_array(path: Path, tensor: Tensor) -> ArraySpec:
    """Write a tensor of any device; no more than a block of it is copied at a time.

    It is on the disk when this returns: the file must survive a power cut.
    """
    spec = ArraySpec(dtype_name(tensor.dtype), tuple(tensor.shape))
    bits = tensor.detach().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()
    header = {"descr": spec.numpy.str, "fortran_order": False, "shape": spec.shape}
    flat = bits.reshape(-1)
    step = BLOCK_BYTES // spec.numpy.itemsize
    with path.open("wb") as file:
        np.lib.format.write_array_header_2_0(file, header)
        for start in range(0, flat.numel(), step):
            block = flat[start : start + step].cpu().numpy().astype(spec.numpy, copy=False)
            file.write(memoryview(block).cast("B"))
        file.flush()
        os.fsync(file.fileno())
    return spec


def map_array(path: Path, spec: ArraySpec) -> Tensor:
    """The tensor of a file, mapped: nothing is read but its header, and writes stay private."""
    if not path.is_file():
        raise GraphError(f"{path} is missing; the saved graph is incomplete, save it again")
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
            start = file.tell()
    except ValueError as error:
        raise GraphError(
            f"{path} ({path.stat().st_size} bytes, {spec.nbytes} bytes of values expected) has no readable "
            f"header: {error}; save the graph again"
        ) from None
    if (shape, fortran, dtype) != (spec.shape, False, spec.numpy):
        raise GraphError(
            f"{path} holds {dtype} {list(shape)} but {spec.dtype} {list(spec.shape)} was saved; save it again"
        )
    size, expected = path.stat().st_size, start + spec.nbytes
    if size != expected:
        raise GraphError(
            f"{path} holds {size} bytes but {expected} were expected for {spec.dtype} {list(spec.shape)}; "
            f"the file is {'truncated' if size < expected else 'not the one that was saved'}, save it again"
        )
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    with path.open("rb") as file:  # copy-on-write, so that torch may call it writable
        options: dict[str, int] = {"access": mmap.ACCESS_COPY}
        if sys.platform == "linux":
            # Linux counts a private writable mapping against free memory and refuses one larger than that,
            # unless a flag says that no page of it needs a reserve. The constant has its name from Python 3.13 on.
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
            options = {"flags": flags, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        mapped = mmap.mmap(file.fileno(), 0, **options)
    values = np.frombuffer(mapped, dtype=spec.numpy, offset=start)
    tensor = torch.from_numpy(values).view(spec.shape)
    return tensor.view(torch.bfloat16) if spec.dtype == "bfloat16" else tensor


VERSION = 1
IDS = "ids.npy"  # the user's own ids as text, of graphs that have some


def save(graph: Graph, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write the graph as the folder ``path``; an existing one is replaced only with ``overwrite=True``."""
    target = Path(path).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if not is_saved(target):
            raise GraphError(f"{target} exists and is not a saved graph; it is left alone, choose another folder")
        if not overwrite:
            raise GraphError(f"{target} already holds a graph; pass overwrite=True to replace it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = _sibling(target, "draft")
        draft.mkdir()
    except OSError as error:
        raise GraphError(f"cannot write {target}: {error.strerror}; choose another folder") from None
    try:
        _write(graph, draft)
        aside = _sibling(target, "old") if is_saved(target) else None
        if aside is not None:
            os.replace(target, aside)
        try:
            os.replace(draft, target)
        except OSError:
            if aside is not None:
                os.replace(aside, target)
            raise
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise GraphError(f"cannot write {target}: {error.strerror}; nothing was kept of it") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def open_saved(path: str | os.PathLike[str], verify: bool = False) -> Graph:
    """A saved folder, mapped: at once, whatever its size, because only sizes and types are compared.

    Pages come from disk as they are touched; writing to them never reaches the file. ``verify=True`` checks
    every value.
    """
    folder = Path(path)
    file = folder / META
    try:
        meta = json.loads(file.read_text())
    except ValueError as error:
        raise GraphError(f"{file} is not readable JSON ({error}); save the graph again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise GraphError(f"{file} is not the description of a saved graph; expected format {FORMAT!r}")
    if meta.get("version") != VERSION:
        raise GraphError(
            f"{folder} has format version {meta.get('version')!r} and this Weft reads version {VERSION}; "
            f"save the graph again or use the Weft that wrote it"
        )
    try:
        specs = {name: ArraySpec.from_dict(spec) for name, spec in meta["arrays"].items()}
        arrays = {name: map_array(folder / f"{name}.npy", spec) for name, spec in specs.items()}
        adj = Adjacency(arrays["indptr"], arrays["indices"], weight=arrays.get("weight"), symmetric=meta["symmetric"])
        adj = adj.attributed(arrays["edge_attr"]) if "edge_attr" in arrays else adj
        x: Tensor | SparseFeatures | None = arrays.get("x")
        if "x_indptr" in arrays:
            columns, values = meta["num_features"], arrays["x_values"]
            x = SparseFeatures(Adjacency(arrays["x_indptr"], arrays["x_indices"], columns, weight=values))
        count, none = meta.get("num_splits", 1), torch.empty(0, dtype=torch.int64)
        suffixes = ["", *(f"_{number}" for number in range(1, count))] if count > 1 else []
        several = [Split(*(arrays.get(name + suffix, none) for name in SPLITS)) for suffix in suffixes]
        graph = Graph(
            adj,
            x,
            arrays.get("y"),
            *(arrays.get(name) for name in SPLITS),
            relation=arrays.get("relation"),
            name=meta["name"],
            num_classes=meta["num_classes"],
            num_relations=meta["num_relations"],
            several=several,
            numbers=meta.get("stats", {}).get("regression"),
        )
        if (folder / IDS).is_file():
            graph.ids = np.load(folder / IDS, mmap_mode="r", allow_pickle=False)
        stats = GraphStats.from_dict(meta["stats"])
        if not graph.num_relations or stats.relation_edges:  # a summary of an older Weft lacks those
            graph._stats = stats
    except (KeyError, TypeError, AttributeError) as error:
        raise GraphError(f"{file} lacks or garbles an entry: {error}; save the graph again") from None
    return graph.verify() if verify else graph


def _sibling(target: Path, what: str) -> Path:
    """A free name on the same file system, so that a rename is all it takes."""
    return target.with_name(f".{target.name}.{what}-{secrets.token_hex(4)}")


def _write(graph: Graph, draft: Path) -> None:
    arrays = {"indptr": graph.adj.indptr, "indices": graph.adj.indices, "weight": graph.adj.weight}
    arrays |= {"relation": graph.relation, "y": graph.y, "edge_attr": graph.edge_attr}
    if isinstance(graph.x, SparseFeatures):
        matrix = graph.x.matrix
        arrays |= {"x_indptr": matrix.indptr, "x_indices": matrix.indices, "x_values": matrix.weight}
    else:
        arrays["x"] = graph.x
    arrays |= {name: getattr(graph, name) for name in SPLITS if getattr(graph, name).numel()}
    for number in range(1, graph.num_splits):
        parts = graph.split_rows(number)._asdict()
        arrays |= {f"{name}_{number}": ids for name, ids in parts.items() if ids.numel()}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    if graph.ids is not None:
        np.save(draft / IDS, graph.ids, allow_pickle=False)
    specs = {name: write_array(draft / f"{name}.npy", array).to_dict() for name, array in arrays.items()}
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "symmetric": graph.adj.symmetric,
        "num_features": graph.num_features,
        "num_classes": graph.num_classes,
        "num_relations": graph.num_relations,
        "num_splits": graph.num_splits,
        "stats": graph.stats().to_dict(),
        "arrays": specs,
    }
    write_json(draft / META, meta, indent=1, flush=True)
