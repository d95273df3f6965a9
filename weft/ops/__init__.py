"""Sparse operators: torch references, Triton kernels for the GPU, numba kernels for the CPU.

Every public function takes an :class:`Adjacency` and dense tensors shaped ``[..., N, F]``.
"""

from weft.ops.adjacency import Adjacency
from weft.ops.attention import graph_attention
from weft.ops.attention_packed import graph_attention_packed
from weft.ops.attention_v2 import graph_attention_v2
from weft.ops.dropout import bias_act_dropout, dropout
from weft.ops.edge_softmax import edge_softmax
from weft.ops.linear import linear, linear_and_pass
from weft.ops.loss import cross_entropy_rows
from weft.ops.mean_heads import mean_heads
from weft.ops.multi_edge_softmax import multi_edge_softmax
from weft.ops.multi_sddmm import multi_sddmm
from weft.ops.multi_spmm import joined_spmm, multi_spmm, pull_push_spmm
from weft.ops.optimizer import adam_
from weft.ops.sddmm import sddmm
from weft.ops.spmm import spmm

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
    "joined_spmm",
    "linear",
    "linear_and_pass",
    "mean_heads",
    "multi_edge_softmax",
    "multi_sddmm",
    "multi_spmm",
    "pull_push_spmm",
    "sddmm",
    "spmm",
]
