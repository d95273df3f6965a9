"""Re-export all CPU kernels, so that one import loads numba and all of them."""

from __future__ import annotations

from weft.ops.cpu.attention import backward_share as attention_backward_share
from weft.ops.cpu.attention import forward_share as attention_share
from weft.ops.cpu.attention_v2 import forward_share as attention_v2_share
from weft.ops.cpu.attention_v2 import source_share as attention_v2_source_share
from weft.ops.cpu.attention_v2 import target_share as attention_v2_target_share
from weft.ops.cpu.dropout_kernel import backward_share as epilogue_backward_share
from weft.ops.cpu.dropout_kernel import forward_share as epilogue_share
from weft.ops.cpu.edges import BLOCK as MAX_BLOCK
from weft.ops.cpu.edges import (
    sddmm_share,
    softmax_backward_share,
    softmax_share,
    spmm_max_backward_share,
    spmm_max_share,
    spmm_share,
)

__all__ = [
    "MAX_BLOCK",
    "attention_backward_share",
    "attention_share",
    "attention_v2_share",
    "attention_v2_source_share",
    "attention_v2_target_share",
    "epilogue_backward_share",
    "epilogue_share",
    "sddmm_share",
    "softmax_backward_share",
    "softmax_share",
    "spmm_max_backward_share",
    "spmm_max_share",
    "spmm_share",
]
