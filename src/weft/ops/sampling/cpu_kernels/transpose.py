"""Transpose a sampled block on the CPU by counting sort.

Shapes: M columns.
"""

from __future__ import annotations

from weft.ops.cpu.kernel import int32s, kernel


@kernel
def transpose(indptr, indices, num_rows, num_cols, out_indptr, out_rows, out_perm):
    """Stable counting sort of a CSR by column; ``out_indptr [M+1]`` starts as zeros, all arrays are int32."""
    indptr, indices, out_indptr = int32s(indptr), int32s(indices), int32s(out_indptr)
    out_rows, out_perm = int32s(out_rows), int32s(out_perm)
    for edge in range(indptr[num_rows]):
        out_indptr[indices[edge] + 1] += 1
    for col in range(num_cols):
        out_indptr[col + 1] += out_indptr[col]
    for row in range(num_rows):
        for edge in range(indptr[row], indptr[row + 1]):
            place = out_indptr[indices[edge]]
            out_rows[place], out_perm[place] = row, edge
            out_indptr[indices[edge]] = place + 1
    for col in range(num_cols, 0, -1):
        out_indptr[col] = out_indptr[col - 1]
    out_indptr[0] = 0
