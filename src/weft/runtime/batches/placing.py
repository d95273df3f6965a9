"""Bring the parts of a graph to where a plan says: on the device, in pinned host memory, or left in mapped files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.placement import Placement
from weft.graph.data.graph import Graph
from weft.graph.data.sparse_features import SparseFeatures
from weft.graph.data.splits import SPLITS, Split
from weft.ops.csr.adjacency import Adjacency
from weft.runtime.batches.pinned import pinned

HOST = torch.device("cpu")


def place_graph(graph: Graph, placement: Placement, device: torch.device) -> Graph:
    """``graph`` with labels and splits on ``device``, features and edges where ``placement`` says."""
    if device.type != "meta":
        _check_files(graph, placement)
    if device.type != "cuda" or placement.on_device:
        return graph.to(device)
    moved = {name: getattr(graph, name).to(device) for name in ("y", *SPLITS) if getattr(graph, name) is not None}
    moved["x"] = _placed_features(graph.x, placement.features, device)
    moved["adj"] = _placed_edges(graph.adj, placement.topology, device)
    if graph.relation is not None:
        moved["relation"] = _placed_relation(graph.relation, moved["adj"])
    if all(moved[name] is getattr(graph, name) for name in moved):
        return graph
    several = [Split(*(ids.to(device) for ids in one)) for one in map(graph.split_rows, range(graph.num_splits))]
    placed = graph._changed(**moved, several=several if graph.num_splits > 1 else ())
    placed._stats = graph._stats
    return placed


def place_features(x: Tensor, place: str, device: torch.device) -> Tensor:
    """A matrix of features where ``place`` says, for batches on ``device``."""
    if device.type != "cuda" or place == "disk":
        return x
    return x.to(device) if place == "gpu" else pinned(x)


def _placed_features(x: Tensor | SparseFeatures, place: str, device: torch.device) -> Tensor | SparseFeatures:
    if isinstance(x, SparseFeatures):  # batches take dense rows
        return x.to(device) if place == "gpu" else place_features(x.to_dense(), place, device)
    return place_features(x, place, device)


def _placed_edges(adj: Adjacency, place: str, device: torch.device) -> Adjacency:
    if place == "gpu":
        return adj.to(device)
    if place == "disk" or (adj.device == HOST and adj.indices.is_pinned()):
        return adj
    weight = None if adj.weight is None else pinned(adj.weight)
    return Adjacency(pinned(adj.indptr), pinned(adj.indices), adj.num_cols, weight=weight, symmetric=adj.symmetric)


def _placed_relation(relation: Tensor, adj: Adjacency) -> Tensor:
    """Beside the edges: pinned where a GPU reads those from host memory."""
    return pinned(relation) if adj.device == HOST and adj.indices.is_pinned() else relation.to(adj.device)


# ---- mapped files ------------------------------------------------------------------------------------


def _check_files(graph: Graph, placement: Placement) -> None:
    if placement.features == "disk":
        _check_mapped("features", graph.x.matrix.indices if isinstance(graph.x, SparseFeatures) else graph.x, graph)
    if placement.topology == "disk":
        _check_mapped("topology", graph.adj.indices, graph)


def _check_mapped(name: str, values: Tensor, graph: Graph) -> None:
    if not is_mapped(values):
        raise InputError(
            f"{name}='disk': graph {graph.name!r} is in memory; write it with graph.save(folder) and give the folder"
        )


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
