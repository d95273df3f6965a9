"""Sparse operators: torch references, Triton kernels for the GPU, numba kernels for the CPU.

Every public function takes an :class:`Adjacency` and dense tensors shaped ``[..., N, F]``.
"""

from typing import TYPE_CHECKING

from weft.core.startup import lazy_names

if TYPE_CHECKING:
    from weft.ops.attention.gat import graph_attention, graph_attention_packed
    from weft.ops.attention.gatv2 import graph_attention_v2
    from weft.ops.attention.mean_heads import mean_heads
    from weft.ops.csr.adjacency import Adjacency
    from weft.ops.dense.adam import adam_
    from weft.ops.dense.bias_act_dropout import bias_act_dropout, dropout
    from weft.ops.dense.cross_entropy import cross_entropy_rows
    from weft.ops.dense.linear import linear, linear_keep_input
    from weft.ops.sparse.edge_softmax import edge_softmax
    from weft.ops.sparse.sddmm import sddmm
    from weft.ops.sparse.spmm import spmm

__all__ = [
    "Adjacency",
    "adam_",
    "bias_act_dropout",
    "cross_entropy_rows",
    "dropout",
    "edge_softmax",
    "graph_attention",
    "graph_attention_packed",
    "graph_attention_v2",
    "linear",
    "linear_keep_input",
    "mean_heads",
    "sddmm",
    "spmm",
]

# An operator registers itself with torch when its module is imported: milliseconds each.
_PLACES = {
    "Adjacency": "weft.ops.csr.adjacency",
    "adam_": "weft.ops.dense.adam",
    "bias_act_dropout": "weft.ops.dense.bias_act_dropout",
    "cross_entropy_rows": "weft.ops.dense.cross_entropy",
    "dropout": "weft.ops.dense.bias_act_dropout",
    "edge_softmax": "weft.ops.sparse.edge_softmax",
    "graph_attention": "weft.ops.attention.gat",
    "graph_attention_packed": "weft.ops.attention.gat",
    "graph_attention_v2": "weft.ops.attention.gatv2",
    "linear": "weft.ops.dense.linear",
    "linear_keep_input": "weft.ops.dense.linear",
    "mean_heads": "weft.ops.attention.mean_heads",
    "sddmm": "weft.ops.sparse.sddmm",
    "spmm": "weft.ops.sparse.spmm",
}
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
