"""multi_edge_softmax: the softmax over the in-edges of every row for several sources at once, in one launch.

    out_s[t, e, h] = exp(scores_s[t, e, h] - max) / sum        max and sum over the edges into the same row

Shapes: T tasks (any leading dimensions), N rows, E edges, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weft.core.errors import InputError
from weft.ops.csr.adjacency import Adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr
from weft.ops.sparse.edge_softmax import edge_softmax_torch
from weft.weave.lab.autograd import differentiable
from weft.weave.together import OpCall


def multi_edge_softmax_torch(csr: PackedCSR, sources: Sequence[Tensor]) -> list[Tensor]:
    """Reference: one source after another."""
    return [edge_softmax_torch(scores, csr) for scores in sources]


def multi_edge_softmax(adj: Adjacency, sources: Sequence[Tensor]) -> list[Tensor]:
    """Softmax of every ``scores [..., E, heads_s]`` (CSR order) over the in-edges of every row; differentiable."""
    for scores in sources:
        if scores.dim() < 2 or scores.shape[-2] != adj.num_edges:
            raise InputError(
                f"multi_edge_softmax: scores of shape {tuple(scores.shape)} must be [..., {adj.num_edges} edges, heads]"
            )
    csr = pack_csr(adj, rows=True)
    return [outputs[0] for outputs in differentiable([OpCall("edge_softmax", (scores, csr)) for scores in sources])]
