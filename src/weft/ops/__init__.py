"""Sparse operators: torch references, Triton kernels for the GPU, numba kernels for the CPU.

Every public function takes an :class:`Adjacency` and dense tensors shaped ``[..., N, F]``.
"""

from typing import TYPE_CHECKING

from weft.core.startup import lazy_names

if TYPE_CHECKING:
    from weft.ops.attention.gat import graph_attention as graph_attention
    from weft.ops.attention.gat import graph_attention_packed as graph_attention_packed
    from weft.ops.attention.gatv2 import graph_attention_v2 as graph_attention_v2
    from weft.ops.attention.mean_heads import mean_heads as mean_heads
    from weft.ops.csr.adjacency import Adjacency as Adjacency
    from weft.ops.dense.adam import adam_ as adam_
    from weft.ops.dense.bias_act_dropout import bias_act_dropout as bias_act_dropout
    from weft.ops.dense.bias_act_dropout import dropout as dropout
    from weft.ops.dense.cross_entropy import cross_entropy_rows as cross_entropy_rows
    from weft.ops.dense.linear import linear as linear
    from weft.ops.dense.linear import linear_keep_input as linear_keep_input
    from weft.ops.sparse.edge_softmax import edge_softmax as edge_softmax
    from weft.ops.sparse.sddmm import sddmm as sddmm
    from weft.ops.sparse.spmm import spmm as spmm

# An operator registers itself with torch when its module is imported: milliseconds each.
_MODULES = {
    "weft.ops.attention.gat": ("graph_attention", "graph_attention_packed"),
    "weft.ops.attention.gatv2": ("graph_attention_v2",),
    "weft.ops.attention.mean_heads": ("mean_heads",),
    "weft.ops.csr.adjacency": ("Adjacency",),
    "weft.ops.dense.adam": ("adam_",),
    "weft.ops.dense.bias_act_dropout": ("bias_act_dropout", "dropout"),
    "weft.ops.dense.cross_entropy": ("cross_entropy_rows",),
    "weft.ops.dense.linear": ("linear", "linear_keep_input"),
    "weft.ops.sparse.edge_softmax": ("edge_softmax",),
    "weft.ops.sparse.sddmm": ("sddmm",),
    "weft.ops.sparse.spmm": ("spmm",),
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULES)
