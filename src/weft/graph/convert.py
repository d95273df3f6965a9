"""Convert graphs of other libraries to the arguments of ``Graph.from_edges``, and back to PyG.

Other libraries' objects are recognised by what they can do, so none of them is imported to read one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.labels import SPLITS
from weft.graph.sparse_features import SparseFeatures

if TYPE_CHECKING:
    from weft.graph.graph import Graph


def scipy_fields(matrix: Any, weighted: bool | None) -> dict[str, Any]:
    """A square scipy sparse matrix: entry (i, j) is the edge i -> j."""
    if not hasattr(matrix, "tocoo"):
        raise GraphError(f"{_kind(matrix)} is not a scipy sparse matrix; for arrays use Graph.from_edges")
    coo = matrix.tocoo()
    if len(coo.shape) != 2 or coo.shape[0] != coo.shape[1]:
        raise GraphError(f"the matrix has shape {list(coo.shape)}; an adjacency is square, nodes by nodes")
    if weighted is None:
        weighted = bool((coo.data != 1).any())
    weight = coo.data if weighted else None
    return {"src": coo.row, "dst": coo.col, "num_nodes": int(coo.shape[0]), "edge_weight": weight}


def is_pyg(value: Any) -> bool:
    """Whether it is a ``Data``, a ``HeteroData`` or a dataset of PyG, or of a class derived from these."""
    return any(base.__module__.startswith("torch_geometric.data") for base in type(value).__mro__)


def pyg_data(data: Any) -> Any:
    """The one ``Data`` in a dataset, and ``HeteroData`` with nodes of one type as ``Data`` with an ``edge_type``."""
    if hasattr(data, "edge_types"):
        if len(data.node_types) != 1:
            raise GraphError(
                f"HeteroData has nodes of {len(data.node_types)} types ({', '.join(data.node_types)}), and Weft trains "
                "on nodes of one; data.to_homogeneous() makes them one, with edge_type, if their features are as wide"
            )
        return data.to_homogeneous(add_node_type=False)
    if hasattr(data, "__getitem__") and not hasattr(data, "stores"):
        if not is_pyg(data) or len(data) != 1:
            raise GraphError(f"{_kind(data)} is not one PyG graph; pass one of its items, for example dataset[0]")
        return pyg_data(data[0])
    return data


def pyg_fields(data: Any, split: int | None) -> dict[str, Any]:
    """A PyG ``Data``."""
    src, dst, weight = _pyg_edges(data)
    masks = {name: getattr(data, f"{name}_mask", None) for name in SPLITS}
    for name, mask in masks.items():
        if mask is not None and mask.dim() > 1 and split is not None:
            if not 0 <= split < mask.shape[1]:
                raise GraphError(f"split={split}: {name}_mask has {mask.shape[1]} columns, 0..{mask.shape[1] - 1}")
            masks[name] = mask[:, split]
    return {
        "src": src,
        "dst": dst,
        "num_nodes": data.num_nodes,
        "x": getattr(data, "x", None),
        "y": getattr(data, "y", None),
        "edge_weight": weight,
        "edge_attr": getattr(data, "edge_attr", None) if getattr(data, "edge_index", None) is not None else None,
        "relation": getattr(data, "edge_type", None),
        **masks,
    }


PYG_READ = {
    *("x", "y", "edge_index", "adj_t", "edge_weight", "edge_attr", "edge_type", "num_nodes"),
    *(f"{name}_mask" for name in SPLITS),
}


def _pyg_edges(data: Any) -> tuple[Any, Any, Any]:
    edges = getattr(data, "edge_index", None)
    if edges is not None:
        attribute = getattr(data, "edge_attr", None)
        single = attribute is not None and (attribute.dim() == 1 or attribute.shape[1:] == (1,))
        weight = getattr(data, "edge_weight", None)
        return edges[0], edges[1], attribute.reshape(-1) if weight is None and single else weight
    transposed = getattr(data, "adj_t", None)
    if transposed is None:
        raise GraphError(f"{_kind(data)} has neither edge_index nor adj_t; pass a PyG Data with edges")
    if isinstance(transposed, Tensor):
        coo = transposed.to_sparse_coo().coalesce()
        return coo.indices()[1], coo.indices()[0], coo.values()
    dst, src, weight = transposed.coo()
    return src, dst, weight


def dgl_fields(graph: Any, x: str, y: str, weight: str) -> dict[str, Any]:
    """A homogeneous DGL graph."""
    if not all(hasattr(graph, name) for name in ("edges", "num_nodes", "ndata", "edata")):
        raise GraphError(f"{_kind(graph)} is not a DGL graph; for arrays use Graph.from_edges")
    kinds = list(getattr(graph, "canonical_etypes", ()))
    if len(kinds) > 1:
        raise GraphError(f"the DGL graph has {len(kinds)} edge types; convert it with dgl.to_homogeneous first")
    src, dst = graph.edges()[:2]
    masks = {name: graph.ndata.get(f"{name}_mask") for name in SPLITS}
    return {
        "src": src,
        "dst": dst,
        "num_nodes": int(graph.num_nodes()),
        "x": graph.ndata.get(x),
        "y": graph.ndata.get(y),
        "edge_weight": graph.edata.get(weight),
        "relation": graph.edata.get("_TYPE"),
        # DGL's own datasets store masks as bytes or floats as well as booleans.
        **{name: None if mask is None else mask.to(torch.bool) for name, mask in masks.items()},
    }


def networkx_fields(graph: Any, x: str, y: str, weight: str) -> dict[str, Any]:
    """A networkx graph, its nodes numbered in iteration order; undirected ones get both directions."""
    if not all(hasattr(graph, name) for name in ("nodes", "edges", "is_directed")):
        raise GraphError(f"{_kind(graph)} is not a networkx graph; for arrays use Graph.from_edges")
    number = {node: position for position, node in enumerate(graph.nodes)}
    edges = list(graph.edges(data=weight))
    weights = _attribute([value for *_, value in edges], weight, "edge", (edge[:2] for edge in edges))
    return {
        "src": np.array([number[edge[0]] for edge in edges], dtype=np.int64),
        "dst": np.array([number[edge[1]] for edge in edges], dtype=np.int64),
        "num_nodes": len(number),
        "x": _attribute([value for _, value in graph.nodes(data=x)], x, "node", graph.nodes),
        "y": _attribute([value for _, value in graph.nodes(data=y)], y, "node", graph.nodes),
        "edge_weight": weights,
        "directed": graph.is_directed(),
    }


def _attribute(values: list[Any], name: str, kind: str, owners: Iterable[Any]) -> np.ndarray | None:
    """An attribute that every node (edge) has, or none has."""
    missing = [value is None for value in values]
    if all(missing):
        return None
    if any(missing):
        owner = next(owner for owner, gone in zip(owners, missing, strict=True) if gone)
        raise GraphError(f"{kind} {owner!r} has no {name!r} while others do; give it to every {kind} or to none")
    try:
        return np.array(values)
    except ValueError as error:
        raise GraphError(f"the {name!r} of the {kind}s differ in shape: {error}") from None


def to_pyg(graph: Graph) -> Any:
    """A PyG ``Data``; edges in CSR order, masks ``[N]`` for the splits that have nodes."""
    try:
        from torch_geometric.data import Data
    except ImportError:
        raise GraphError("to_pyg needs PyG, which is not installed: pip install torch-geometric") from None
    x = graph.x.to_dense() if isinstance(graph.x, SparseFeatures) else graph.x
    data = Data(x=x, edge_index=graph.edge_index(), y=graph.y, num_nodes=graph.num_nodes)
    if graph.edge_weight is not None:
        data.edge_weight = graph.edge_weight
    if graph.edge_attr is not None:
        data.edge_attr = graph.edge_attr
    if graph.relation is not None:
        data.edge_type = graph.relation.long()
    for name in SPLITS:
        if getattr(graph, name).numel():
            ids = [getattr(graph.split_rows(number), name) for number in range(graph.num_splits)]
            none = torch.zeros(graph.num_nodes, dtype=torch.bool, device=ids[0].device)
            masks = [none.index_fill(0, each, True) for each in ids]
            data[f"{name}_mask"] = masks[0] if len(masks) == 1 else torch.stack(masks, 1)
    return data


def _kind(thing: Any) -> str:
    return f"an object of type {type(thing).__name__}"
