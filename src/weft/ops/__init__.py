"""Sparse operators: torch references, Triton kernels for the GPU, numba kernels for the CPU.

Every public function takes an :class:`Adjacency` and dense tensors shaped ``[..., N, F]``.
"""

from weft.ops.attention.gat import graph_attention
from weft.ops.attention.gat_packed import graph_attention_packed
from weft.ops.attention.gatv2 import graph_attention_v2
from weft.ops.attention.mean_heads import mean_heads
from weft.ops.csr.adjacency import Adjacency
from weft.ops.dense.bias_act_dropout import bias_act_dropout, dropout
from weft.ops.dense.linear import linear, linear_keep_input
from weft.ops.sparse.edge_softmax import edge_softmax
from weft.ops.sparse.sddmm import sddmm
from weft.ops.sparse.spmm import spmm
from weft.ops.train.adam import adam_
from weft.ops.train.cross_entropy import cross_entropy_rows

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
