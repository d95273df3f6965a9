"""Call a model on a graph: Weft's ``(x, adj)``, one of PyG's styles, or ``(x)`` alone.

Shapes: N nodes, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.batches.block import exact_device
from weft.batches.placement import place_features
from weft.batches.source import Batch, Features, FullGraph, MakeSource, Source, SourceRequest
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures
from weft.nn.models import GNN
from weft.ops.csr.adjacency import Adjacency, row_sums
from weft.runtime.modules.settings import OF_EDGES, call_style, parameters_of

if TYPE_CHECKING:
    from weft.runtime.modules.convert import Converted


def treated(x: Features, norm: str | None, dtype: torch.dtype, dense: bool) -> Features:
    """``x`` divided by its sums (``norm="row"``) or not, in the type of the weights, with its zeros if ``dense``.

    Sparse features keep sharing their structure.
    """
    x = row_normalised(x) if norm == "row" else x
    if isinstance(x, Tensor):
        return x.to(dtype)
    x = x if x.dtype == dtype else SparseFeatures(x.matrix.scaled(weight=x.values.to(dtype)))
    return x.to_dense() if dense else x


def row_normalised(x: Features) -> Features:
    """Every row divided by the sum of its magnitudes; rows of zeros stay zeros."""
    if isinstance(x, Tensor):
        total = x.abs().sum(1, keepdim=True)
        return x / torch.where(total > 0, total, 1.0)
    total = row_sums(x.values.abs(), x.matrix.indptr)
    share = x.values / torch.where(total > 0, total, 1.0)[x.matrix.rows().long()]
    return SparseFeatures(x.matrix.scaled(weight=share))


def first_aggregate(model: nn.Module, x: Features, adj: Adjacency) -> Tensor | None:
    """The first layer's aggregation of the features, or None if the model does not offer one."""
    if not _takes_first(model):
        return None
    with torch.no_grad():
        return model.first_aggregate(x, adj)


def bind(model: nn.Module) -> Callable[[Batch], Tensor]:
    """A function that runs ``model`` on a batch, with the arguments that its ``forward`` takes."""
    style, names = call_style(model), list(parameters_of(model))
    if style == "features":
        return lambda batch: model(batch.x)
    if style == "data":
        return lambda batch: model(pyg_data(batch))
    if style == "transposed":
        return lambda batch: model(batch.x, batch.adj_t)
    if style == "edges":
        per_edge = [name for name in OF_EDGES if name in names]
        return lambda batch: model(batch.x, batch.edge_index, **_per_edge(batch, per_edge))
    if layers_of(model) is not None:
        return lambda batch: model(batch.x, batch.blocks, first=batch.first, layer=batch.layer)
    if _takes_first(model):
        return lambda batch: model(batch.x, batch.blocks, first=batch.first)
    return lambda batch: model(batch.x, batch.blocks)


def _per_edge(batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    """Those of ``names`` that the graph has."""
    values = {name: getattr(batch, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def pyg_data(batch: Batch) -> Any:
    """A batch as the ``data`` of PyG's modules: features, edges and what the graph has per edge, without labels."""
    values = {"x": batch.x, "edge_index": batch.edge_index, **_per_edge(batch, OF_EDGES)}
    try:
        from torch_geometric.data import Data
    except ImportError:
        return SimpleNamespace(**values)
    return Data(num_nodes=batch.x.shape[0], **values)


def edge_arguments(model: nn.Module, adj: Adjacency) -> dict[str, Tensor]:
    """``edge_index`` or ``adj_t``, and what else ``model`` takes of the edges of ``adj``, by name."""
    names = [name for name in ("edge_index", "adj_t", *OF_EDGES) if name in parameters_of(model)]
    none = torch.zeros(0, dtype=torch.int64, device=adj.device)
    batch = Batch(none, adj, none, none, none)
    return _per_edge(batch, names)


def takes_edges(model: nn.Module) -> bool:
    """Whether the model is called like PyG's, with dense features only."""
    return call_style(model) in ("edges", "transposed", "data")


def takes_blocks(model: nn.Module) -> bool:
    """Whether the model takes one block per layer: a built-in one, or one whose second argument is ``blocks``."""
    return layers_of(model) is not None or list(parameters_of(model))[1:2] == ["blocks"]


def layers_of(model: nn.Module) -> int | None:
    """How many layers the model has, if it can run each alone; else None: ``layer`` may mean anything elsewhere."""
    return len(model.convs) if isinstance(model, GNN) and {"first", "layer"} <= parameters_of(model).keys() else None


def _takes_first(model: nn.Module) -> bool:
    """Whether the model computes its first aggregation apart; in others ``first`` may mean anything."""
    return hasattr(model, "first_aggregate") and "first" in parameters_of(model)


class Inputs:
    """The inputs of a group: features, their first aggregations and sources, each made once per group.

    ``make_source(request)`` makes the source of batches; the whole graph, unless given. ``device``: where it trains,
    the graph's unless given; ``place``: where features lie (:data:`weft.core.placement.PLACES`). ``converted``: what
    was decided of layers of PyG in modules that are built again, None for those that are not; ``agree``: whether
    members that are built again were found to have the numbers in their stack that they have alone; ``group_size``:
    how many tasks train in turn or together.
    """

    def __init__(
        self, graph: Graph, make_source: MakeSource = FullGraph, device: torch.device | None = None, place: str = "gpu"
    ) -> None:
        self.graph, self._make_source, self._place = graph, make_source, place
        self.device = graph.device if device is None else exact_device(device)
        self.converted: Converted | None = None
        self.agree = False
        self.group_size = 1
        self._sources: dict[tuple[Any, ...], Source] = {}
        self._features: dict[tuple[Any, ...], Features] = {}
        self._firsts: dict[tuple[Any, ...], Tensor | None] = {}

    def over(self, graph: Graph) -> Inputs:
        """The same over other rows: ``graph``."""
        return Inputs(graph, self._make_source, self.device, self._place)

    def features(self, norm: str | None, dtype: torch.dtype, dense: bool = False) -> Features:
        """Divided by their sums (``norm="row"``) or not, in ``dtype``, with their zeros if ``dense``."""
        key = (norm, dtype, dense)
        if key not in self._features and self.graph.x.device.type == "meta" and self._place != "gpu":
            # Of a dry run: they lie elsewhere, whatever they are, and take nothing here.
            self._features[key] = torch.empty((1, 1), dtype=dtype, device="meta").expand(self.graph.x.shape)
        if key not in self._features:
            x = treated(self.graph.x, norm, dtype, dense)
            self._features[key] = place_features(x, self._place, self.device) if isinstance(x, Tensor) else x
        return self._features[key]

    def source(
        self,
        x: Features,
        first: Tensor | None = None,
        subgraph: bool = False,
        padding: bool = False,
        of_edges: tuple[str, ...] = (),
    ) -> Source:
        """The source of batches with the features ``x``; stacks with equal inputs share it, and so its batches."""
        key = (id(x), id(first), subgraph, padding, of_edges)
        if key not in self._sources:
            request = SourceRequest(self.graph, x, first, subgraph, padding, self.device, of_edges)
            self._sources[key] = self._make_source(request)
        return self._sources[key]

    def release(self, x: Features) -> None:
        """Forget features that no stack needs after all; one that comes to need them makes them again."""
        self._features = {key: value for key, value in self._features.items() if value is not x}
        self._sources = {key: value for key, value in self._sources.items() if key[0] != id(x)}

    def held(self) -> tuple[Any, ...]:
        """Everything that is kept for all steps."""
        return (*self._features.values(), *self._firsts.values())

    def first(self, model: nn.Module, x: Features, name: Any) -> Tensor | None:
        """The model's first aggregation of ``x``; models of one ``name`` share it (None: not shared).

        A run before this one may have left it with a graph that is kept.
        """
        if name is None:
            return first_aggregate(model, x, self.graph.adj)
        kept = self.graph.kept if x is self.graph.x else None
        table, key = (self._firsts, (name, id(x))) if kept is None else (kept, name)
        if key not in table:
            table[key] = first_aggregate(model, x, self.graph.adj)
        self._firsts[name, id(x)] = table[key]
        return self._firsts[name, id(x)]
