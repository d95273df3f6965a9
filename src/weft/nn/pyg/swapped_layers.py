"""Layers of PyG that compute with Weft's operators: the same class, weights and arguments, another ``forward``.

A swapped layer is the user's own object, whose class is replaced by a subclass here. A call that Weft's operators do
not cover (bipartite features, learned edge weights, requested attention weights, ...) takes PyG's ``forward``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import nn as pyg

from weft import ops
from weft.graph.sparse_features import SparseFeatures
from weft.nn.conv import AttentionConv, Conv, aggregates_first
from weft.nn.epilogue import CallMask
from weft.nn.features import Features, as_dense, transform
from weft.nn.pyg.convert import DROPOUT, setup_of
from weft.nn.pyg.edges import edges_of
from weft.ops import Adjacency
from weft.ops.dense.linear import needs_gradient

TEMPLATE, BUILDS, SETUP = "_weft_layer", "_weft_builds", "_weft_setup"


class Swapped:
    """What swapped layers share: whether Weft's operators cover a call, and a layer of Weft's with these weights."""

    takes_sparse = False  # whether its input may be SparseFeatures

    def covered(self: Any, x: Any, edge_index: Any, edge_weight: Any = None, otherwise: Any = None) -> Adjacency | None:
        """The adjacency of a call that Weft's operators cover, else None; ``otherwise`` must be None for that."""
        takes = type(x) in ((Tensor, nn.Parameter, SparseFeatures) if self.takes_sparse else (Tensor, nn.Parameter))
        plain = takes and len(x.shape) == 2 and x.dtype in (torch.float32, torch.bfloat16)
        plain = plain and setup_of(self) == vars(self)[SETUP]  # what has changed since is PyG's to compute
        adj = None
        if plain and otherwise is None and not self.explain and not torch.compiler.is_compiling():
            edges = edges_of(edge_index, x.shape[0], vars(self)[BUILDS])
            adj = None if edges is None else edges.weighted(edge_weight)
        return adj

    def layer(self: Any, x: Features, **weights: Tensor | None) -> Conv:
        """Weft's layer with ``weights``, for one call on ``x``; the template itself holds no data."""
        template: Conv = vars(self)[TEMPLATE]
        conv = object.__new__(type(template))
        changed: dict[str, Any] = {"_parameters": {"weight_residual": None, **weights}}
        if hasattr(template, "constant_input"):
            changed["constant_input"] = is_constant(x)
        if isinstance(template, AttentionConv) and DROPOUT not in self._modules:
            mask = CallMask(self.dropout, self.training, next(w for w in weights.values() if w is not None))
            changed["_modules"] = {**template._modules, "dropout": mask}
        conv.__dict__ = {**vars(template), **changed}
        return conv


class WeftGCNConv(Swapped, pyg.GCNConv):
    """PyG's GCNConv."""

    takes_sparse = True

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """``[N, in]`` to ``[N, out]``."""
        adj = self.covered(x, edge_index, edge_weight)
        if adj is None:
            return super().forward(x, edge_index, edge_weight)
        return self.layer(x, weight=self.lin.weight, bias=self.bias)(x, adj)


class WeftSAGEConv(Swapped, pyg.SAGEConv):
    """PyG's SAGEConv with a mean, a sum or a maximum."""

    takes_sparse = True

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """``[N, in]`` to ``[N, out]``."""
        adj = self.covered(x, edge_index, otherwise=size)
        if adj is None:
            return super().forward(x, edge_index, size)
        if self.root_weight and not self.project:
            weights = {"weight_neighbour": self.lin_l.weight, "weight_self": self.lin_r.weight, "bias": self.lin_l.bias}
            out = self.layer(x, **weights)(x, adj)
        else:
            out = self._without_root(x, adj)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _without_root(self, x: Tensor, adj: Adjacency) -> Tensor:
        x = as_dense(x)
        root = self.lin_r(x) if self.root_weight else None
        x = self.lin(x).relu() if self.project else x
        out = summed_linear(adj, x, self.lin_l, "sum" if self.aggr == "add" else self.aggr)
        return out if root is None else out + root


class WeftGINConv(Swapped, pyg.GINConv):
    """PyG's GINConv with any network inside, which stays as it is."""

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """``[N, in]`` to whatever the network makes of it."""
        adj = self.covered(x, edge_index, otherwise=size)
        if adj is None:
            return super().forward(x, edge_index, size)
        return self.nn(torch.addcmul(ops.spmm(adj, x), x, 1.0 + self.eps))


class WeftGATConv(Swapped, pyg.GATConv):
    """PyG's GATConv without edge features."""

    takes_sparse = True

    def forward(self, x: Any, edge_index: Any, edge_attr: Any = None, size: Any = None, **options: Any) -> Any:
        """``[N, in]`` to ``[N, out]``."""
        extras = (edge_attr, size, options.get("return_attention_weights"))
        adj = self.covered(x, edge_index, otherwise=None if extras == (None, None, None) else extras)
        if adj is None:
            return super().forward(x, edge_index, edge_attr, size, **options)
        weights = {"weight": self.lin.weight, "attention": torch.cat([self.att_src, self.att_dst]), "bias": self.bias}
        return self.layer(x, **weights, **residual(self))(x, adj)


class WeftGATv2Conv(Swapped, pyg.GATv2Conv):
    """PyG's GATv2Conv without edge features."""

    takes_sparse = True

    def forward(self, x: Any, edge_index: Any, edge_attr: Any = None, **options: Any) -> Any:
        """``[N, in]`` to ``[N, out]``."""
        extras = (edge_attr, options.get("return_attention_weights"))
        adj = self.covered(x, edge_index, otherwise=None if extras == (None, None) else extras)
        if adj is None:
            return super().forward(x, edge_index, edge_attr, **options)
        weights = {"weight_src": self.lin_l.weight, "bias_src": self.lin_l.bias, "bias": self.bias}
        if not self.share_weights:
            weights |= {"weight_dst": self.lin_r.weight, "bias_dst": self.lin_r.bias}
        return self.layer(x, **weights, attention=self.att.squeeze(0), **residual(self))(x, adj)


class WeftGraphConv(Swapped, pyg.GraphConv):
    """PyG's GraphConv with a sum or a mean."""

    takes_sparse = True

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None, size: Any = None) -> Tensor:
        """``[N, in]`` to ``[N, out]``."""
        adj = self.covered(x, edge_index, edge_weight, otherwise=size)
        if adj is None:
            return super().forward(x, edge_index, edge_weight, size)
        return summed_linear(adj, x, self.lin_rel, "sum" if self.aggr == "add" else self.aggr) + transform(
            x, self.lin_root.weight
        )


class WeftSGConv(Swapped, pyg.SGConv):
    """PyG's SGConv."""

    takes_sparse = True

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """``[N, in]`` to ``[N, out]``."""
        adj = self.covered(x, edge_index, edge_weight)
        if adj is None:
            return super().forward(x, edge_index, edge_weight)
        outputs, inputs = self.lin.weight.shape
        wide = not isinstance(x, Tensor) or not aggregates_first(inputs, outputs, is_constant(x))
        x = transform(x, self.lin.weight) if wide else x
        for _ in range(self.K):
            x = ops.spmm(adj.gcn(), x)
        if not wide:
            return ops.linear(x, self.lin.weight, self.lin.bias)
        return x if self.lin.bias is None else x + self.lin.bias


class WeftAPPNP(Swapped, pyg.APPNP):
    """PyG's APPNP without dropout of edges."""

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """``[N, F]`` to ``[N, F]``."""
        adj = self.covered(x, edge_index, edge_weight)
        if adj is None:
            return super().forward(x, edge_index, edge_weight)
        start = x
        for _ in range(self.K):
            x = ops.spmm(adj.gcn(), x) * (1 - self.alpha) + self.alpha * start
        return x


def is_constant(x: Features) -> bool:
    """Whether no gradient of the features is needed."""
    return not isinstance(x, Tensor) or not needs_gradient(x)


def summed_linear(adj: Adjacency, x: Features, last: nn.Module, reduce: str) -> Tensor:
    """``reduce(x over neighbours) W^T + b``; sums and means commute with the product, which then may come first."""
    weight: Tensor = last.weight  # type: ignore[assignment]
    bias: Tensor | None = last.bias  # type: ignore[assignment]
    matrix, how = (adj.mean(), "sum") if reduce == "mean" else (adj, reduce)
    outputs, inputs = weight.shape
    if isinstance(x, Tensor) and (how == "max" or aggregates_first(inputs, outputs, is_constant(x))):
        return ops.linear(ops.spmm(matrix, x, reduce=how), weight, bias)
    out = ops.spmm(matrix, transform(x, weight))
    return out if bias is None else out + bias


def residual(layer: Any) -> dict[str, Tensor | None]:
    """The weight of an attention layer's residual, if it has one."""
    return {"weight_residual": None if layer.res is None else layer.res.weight}


SWAPPED: dict[type, type] = {
    pyg.GCNConv: WeftGCNConv,
    pyg.SAGEConv: WeftSAGEConv,
    pyg.GINConv: WeftGINConv,
    pyg.GATConv: WeftGATConv,
    pyg.GATv2Conv: WeftGATv2Conv,
    pyg.GraphConv: WeftGraphConv,
    pyg.SGConv: WeftSGConv,
    pyg.APPNP: WeftAPPNP,
}
