"""The part of ``sddmm`` in a shared launch."""

from __future__ import annotations

from torch import Tensor

from weft.ops.backend import next_power_of_2
from weft.ops.launch import flatten_tasks, triton_acc
from weft.ops.multi_launch import Part
from weft.ops.sddmm_triton import sddmm_piece
from weft.ops.walk import unpack


def sddmm_parts(a, b, heads, walk, back=()) -> tuple[tuple[Tensor, ...], list[Part]]:
    """``((out [..., E, H],), parts)`` of the dot products of ``a [..., N, H*D]`` and ``b [..., M, H*D]``."""
    walk = unpack(walk)
    a_TNF, b_TMF = flatten_tasks(a, 2), flatten_tasks(b, 2)
    tasks, D, E = a_TNF.shape[0], a.shape[-1] // heads, walk.num_edges
    out = a.new_empty(tasks, E, heads)
    shaped = (out.reshape(*a.shape[:-2], E, heads),)
    if out.numel() == 0:
        return shaped, []
    block_d = min(next_power_of_2(D), 128)
    block_e = max(16, 2048 // block_d)
    rows = walk.row_of_edge if walk.row_of_edge.numel() else walk.rows()
    arguments = (a_TNF, b_TMF, rows, walk.indices, out, E, a_TNF.shape[1], b_TMF.shape[1])
    constants = {"heads": heads, "D": D, "ACC": triton_acc(a.dtype), "BE": block_e, "BD": block_d}
    return shaped, [Part(sddmm_piece, (-(-E // block_e), heads, tasks), arguments, tuple(constants.items()))]
