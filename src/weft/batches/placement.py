"""Bring the parts of a graph to where a plan says: on the device, in pinned host memory, or left in mapped files."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from weft.core.errors import InputError, OutOfMemoryError
from weft.core.host_memory import advise_huge_pages, free_host_bytes, host_bytes
from weft.core.placement import DataPlacement
from weft.core.units import show_bytes
from weft.graph.graph import Graph
from weft.graph.labels import SPLITS, Split
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency

# ---- Pinned host memory, which a GPU reads by itself; large tensors are pinned where they lie, copies in huge pages.

LARGE = 1 << 25  # bytes from which on a copy gets huge pages
IN_PLACE = 1 << 30  # bytes from which on a tensor is pinned where it is: a copy would need as much memory again


def pinned(tensor: Tensor) -> Tensor:
    """``tensor`` in pinned host memory: itself if it is there, or pinned where it lies, or a copy."""
    if not tensor.is_cuda and tensor.is_pinned():
        return tensor
    size = tensor.numel() * tensor.element_size()
    if size < LARGE:
        return tensor.cpu().contiguous().pin_memory()
    if size < IN_PLACE or tensor.is_cuda or not tensor.is_contiguous():
        host = touched(tensor.shape, tensor.dtype)
        return (host if register(host) else host.pin_memory()).copy_(tensor)
    return tensor if register(tensor) else tensor.pin_memory()


def touched(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Zeros on the host, in huge pages if the system has them.

    All threads touch the pages: the driver would do that by itself when it pins them, one page at a time.
    """
    host = torch.empty(shape, dtype=dtype, device="cpu")
    advise_huge_pages(host.data_ptr(), host.numel() * host.element_size())
    return host.fill_(0)


def register(tensor: Tensor) -> bool:
    """Pin the memory of a CPU tensor where it lies, for as long as the storage lives; returns whether that worked."""
    runtime, storage = torch.cuda.cudart(), tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if int(runtime.cudaHostRegister(address, size, 0)) != 0:
        _forget_error()
        return False
    weakref.finalize(storage, _unregister, address)
    return True


def _unregister(address: int) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _forget_error()


def _forget_error() -> None:
    """The next launch reports the error of a call that failed before it: let that be this one."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


HOST = torch.device("cpu")


def place_graph(graph: Graph, placement: DataPlacement, device: torch.device) -> Graph:
    """``graph`` with labels and splits on ``device``, features and edges where ``placement`` says."""
    x, adj = graph.x, graph.adj
    if device.type != "meta":
        features = x.matrix.indices if isinstance(x, SparseFeatures) else x
        for name, tier, values in (
            ("features", placement.features, features),
            ("topology", placement.topology, adj.indices),
        ):
            if tier == "disk" and not is_mapped(values):
                raise InputError(
                    f"{name}='disk': graph {graph.name!r} is in memory; write it with graph.save(folder) and give the "
                    "folder"
                )
    if device.type != "cuda" or placement.on_device:
        return graph.to(device)
    moved = {name: getattr(graph, name).to(device) for name in ("y", *SPLITS) if getattr(graph, name) is not None}
    if isinstance(x, SparseFeatures):  # batches take dense rows
        on_gpu = placement.features == "gpu"
        moved["x"] = x.to(device) if on_gpu else place_features(x.to_dense(), placement.features, device)
    else:
        moved["x"] = place_features(x, placement.features, device)
    pinned_already = adj.device == HOST and adj.indices.is_pinned()
    if placement.topology == "gpu":
        adj = adj.to(device)
    elif placement.topology != "disk" and not pinned_already:
        weight = None if adj.weight is None else pinned(adj.weight)
        adj = Adjacency(pinned(adj.indptr), pinned(adj.indices), adj.num_cols, weight=weight, symmetric=adj.symmetric)
    moved["adj"] = adj
    if graph.relation is not None:  # with the edges
        hosted = adj.device == HOST and adj.indices.is_pinned()
        moved["relation"] = pinned(graph.relation) if hosted else graph.relation.to(adj.device)
    if all(moved[name] is getattr(graph, name) for name in moved):
        return graph
    several = [Split(*(ids.to(device) for ids in split)) for split in map(graph.split_rows, range(graph.num_splits))]
    placed = graph._changed(**moved, several=several if graph.num_splits > 1 else ())
    placed._stats = graph._stats
    return placed


def place_features(x: Tensor, tier: str, device: torch.device) -> Tensor:
    """A matrix of features where ``tier`` says, for batches on ``device``."""
    if device.type != "cuda" or tier == "disk":
        return x
    return x.to(device) if tier == "gpu" else pinned(x)


def is_mapped(tensor: Tensor) -> bool:
    """Whether the values lie in a mapped file."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return False
    address = tensor.data_ptr()
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: believe the user
        return True
    for line in lines:
        begin, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return len(line.split(maxsplit=5)) == 6 and line.split(maxsplit=5)[5].startswith("/")
    return False


# ---- Room for large results on the host: in memory, or in a temporary file where that is short.

ACTIVATIONS = "what an evaluation keeps on the host between layers"
KEPT = 0.1  # of all memory that stays free for others, and of the disk's free bytes


def free_disk_bytes() -> int:
    """Of the folder for temporary files; 0 where that lies in memory."""
    folder, mounts = os.path.realpath(tempfile.gettempdir()), list[list[str]]()
    with suppress(OSError):
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    above = [(len(point), kind) for point, kind in mounts if Path(folder).is_relative_to(point)]
    in_memory = max(above, default=(0, ""))[1] in ("tmpfs", "ramfs")
    return 0 if in_memory else shutil.disk_usage(folder).free


def host_room(shape: tuple[int, ...], dtype: torch.dtype, pin: bool, what: str) -> Tensor:
    """An array in host memory, pinned if ``pin``; where there is not enough, in a file that goes with the array.

    ``what`` it is for: said where the disk is too small as well.
    """
    size = prod(shape) * dtype.itemsize
    if size <= max(_memory(), 0):
        made = torch.empty(shape, dtype=dtype)
        return pinned(made) if pin else made
    if size > _disk():
        raise OutOfMemoryError(too_little(size, what))
    try:
        with tempfile.NamedTemporaryFile(prefix="weft-") as file:  # the mapping keeps its bytes after its name is gone
            os.posix_fallocate(file.fileno(), 0, size)  # a disk that fills up later would end the process
            return torch.from_file(file.name, shared=True, size=prod(shape), dtype=dtype).view(shape)
    except OSError:
        raise OutOfMemoryError(too_little(size, what)) from None


def _memory() -> int:
    return free_host_bytes() - int(KEPT * host_bytes())


def _disk() -> int:
    return int((1 - KEPT) * free_disk_bytes())


def too_little(size: int, what: str) -> str:
    """What to say where neither memory nor disk has room."""
    free, disk = show_bytes(free_host_bytes()), show_bytes(free_disk_bytes())
    return (
        f"{what} takes {show_bytes(size)}, but the host has {free} of memory free and {tempfile.gettempdir()} {disk} "
        "of disk; point TMPDIR to a larger disk, train fewer tasks at once, or narrower ones"
    )


def fits_host(sizes: Iterable[int]) -> bool:
    """Whether there is room for arrays of so many bytes, one after another as :func:`host_room` places them."""
    memory, disk = _memory(), _disk()
    for size in sizes:
        if size <= memory:
            memory -= size
        elif size <= disk:
            disk -= size
        else:
            return False
    return True
