"""Layers of Weft with the sizes of one of PyG's, for PyG's layers that compute with Weft's operators.

A layer that Weft's operators do not cover is refused with a :class:`SpecError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.core.errors import SpecError
from weft.nn.conv.conv import Conv
from weft.nn.conv.gat import GATConv
from weft.nn.conv.gatv2 import GATv2Conv
from weft.nn.conv.gcn import GCNConv
from weft.nn.conv.sage import SAGEConv
from weft.nn.pyg.layers import aggregator, gat_from, gatv2_from, gcn_from, require, require_sum


def gcn_like(theirs: Any) -> GCNConv:
    """A layer for :class:`weft.nn.pyg.swapped_layers.WeftGCNConv`."""
    _require_usual(theirs)
    return gcn_from(theirs)


def sage_like(theirs: Any) -> SAGEConv:
    """A layer for :class:`weft.nn.pyg.swapped_layers.WeftSAGEConv`; it may normalise, project or leave out the root."""
    _require_usual(theirs)
    outputs, inputs = theirs.lin_l.weight.shape
    return SAGEConv(inputs, outputs, aggregator(theirs), bias=theirs.lin_l.bias is not None)


def gin_like(theirs: Any) -> None:
    """Check a GINConv; whatever network it has stays as it is."""
    _require_usual(theirs)
    require_sum(theirs)


def attention_like(theirs: Any) -> GATConv | GATv2Conv:
    """A layer for PyG's GATConv or GATv2Conv."""
    _require_usual(theirs)
    return gatv2_from(theirs) if hasattr(theirs, "share_weights") else gat_from(theirs)


def graph_conv_like(theirs: Any) -> None:
    """Check a GraphConv."""
    _require_usual(theirs)
    if theirs.aggr not in ("add", "sum", "mean"):
        raise SpecError(f"GraphConv: aggr={theirs.aggr!r} has no counterpart in Weft; add and mean have")


def propagation_like(theirs: Any) -> None:
    """Check an SGConv or APPNP."""
    _require_usual(theirs)
    require(theirs, normalize=True, add_self_loops=True, dropout=0.0)
    require_sum(theirs)
    if hasattr(theirs, "_cached_x"):
        require(theirs, cached=False)


def _require_usual(theirs: Any) -> None:
    require(theirs, flow="source_to_target", decomposed_layers=1)
    if isinstance(getattr(theirs, "in_channels", 0), (tuple, list)):
        pair = tuple(theirs.in_channels)
        if pair[0] != pair[1]:
            raise SpecError(f"{type(theirs).__name__}: in_channels={pair} has no counterpart in Weft")


TEMPLATES: dict[str, Callable[[Any], Conv | None]] = {
    "GCNConv": gcn_like,
    "SAGEConv": sage_like,
    "GINConv": gin_like,
    "GATConv": attention_like,
    "GATv2Conv": attention_like,
    "GraphConv": graph_conv_like,
    "SGConv": propagation_like,
    "APPNP": propagation_like,
}
