"""Sparse operators: torch references, Triton kernels for the GPU, numba kernels for the CPU.

Every public function takes an :class:`Adjacency` and dense tensors shaped ``[..., N, F]``.
"""

from weft.ops.adjacency import Adjacency

__all__ = ["Adjacency"]
