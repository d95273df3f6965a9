"""The adjacency that stands for an ``edge_index`` of PyG, remembered on the tensor itself.

Torch counts what changes a tensor in place, and the adjacency of one that was changed is not used. It does not count
writes through ``.data``, NumPy or DLPack: a run forgets the adjacency of a tensor that is reached that way; outside of
a run nothing sees it, and a layer has to be given a new tensor.

Shapes: N nodes, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.nn.conv import without_weights
from weft.ops import Adjacency
from weft.ops.csr.adjacency import offset_dtype

NAME = "_weft_edges"  # the attribute of a tensor
BYPASSES = frozenset((
    *(Tensor.data.__get__, Tensor.data.__set__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
    *(Tensor.untyped_storage, Tensor.storage),
))  # fmt: skip


@dataclass(frozen=True)
class Edges:
    """An adjacency of the edges of a tensor at its ``version``; ``order [E]``: where its edges are in the tensor.

    ``order`` is None if they are in the same order.
    """

    adj: Adjacency
    version: int
    order: Tensor | None = None

    def weighted(self, edge_weight: Tensor | None) -> Adjacency | None:
        """The adjacency with these weights; None if they are to be learned, or are not one number per edge."""
        if edge_weight is None:
            return without_weights(self.adj)
        if edge_weight is self.adj.weight:
            return self.adj
        fits = edge_weight.shape == (self.adj.num_edges,) and edge_weight.dtype == torch.float32
        if self.order is None or edge_weight.requires_grad or not fits:
            return None
        return self.adj.scaled(weight=edge_weight[self.order])


def remember(edge_index: Tensor, adj: Adjacency) -> Tensor:
    """``edge_index [2, E]`` with the adjacency that it was made from, edge for edge."""
    setattr(edge_index, NAME, Edges(adj, edge_index._version))
    return edge_index


def is_bypass(func: Any) -> bool:
    """Whether ``func`` gives access to a tensor's memory that torch does not count."""
    return func in BYPASSES


def forget(edge_index: Any) -> None:
    """Let the adjacency of a tensor be found anew, or not at all."""
    if getattr(edge_index, NAME, None) is not None:
        delattr(edge_index, NAME)


def edges_of(edge_index: Any, nodes: int, builds: bool) -> Edges | None:
    """The adjacency of ``edge_index [2, E]`` over ``nodes``; one that is not remembered is built if ``builds``."""
    if isinstance(edge_index, Adjacency):
        return Edges(edge_index, 0) if edge_index.num_rows == edge_index.num_cols == nodes else None
    if type(edge_index) is not Tensor:
        return None
    remembered = getattr(edge_index, NAME, None)
    if remembered is not None and remembered.version == edge_index._version and remembered.adj.num_rows == nodes:
        return remembered
    listed = edge_index.layout is torch.strided and edge_index.dim() == 2 and edge_index.shape[0] == 2
    if not builds or not listed or edge_index.is_meta:
        return None
    built = _built(edge_index, nodes)
    if built is not None:
        setattr(edge_index, NAME, built)
    return built


def _built(edge_index: Tensor, nodes: int) -> Edges | None:
    """The edges sorted by destination; None if a number is no node."""
    src, dst = edge_index.long()
    if src.numel() and not (int(edge_index.min()) >= 0 and int(edge_index.max()) < nodes):
        return None
    order = torch.argsort(dst, stable=True)
    indptr = torch.zeros(nodes + 1, dtype=torch.int64, device=dst.device)
    torch.cumsum(torch.bincount(dst, minlength=nodes), 0, out=indptr[1:])
    adj = Adjacency(indptr.to(offset_dtype(dst.numel())), src[order].to(torch.int32))
    return Edges(adj, edge_index._version, order)
