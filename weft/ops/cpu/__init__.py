"""CPU kernels for float32 and float64, compiled by numba; the torch references serve every other type.

Chosen by measurement (``benchmarks/cpu_ops.py``, figures in ``benchmarks/results/cpu_ops.json``; two cores, times
faster than the torch reference): spmm 10 to 90, epilogue 10 to 20, attention 6 to 30, elu 0.8 to 1.5. MKL's CSR
product takes 0.6 (F = 7, cora) to 2.7 times as long as spmm here (F = 64, facebook), and would need its values
multiplied out for every edge. Every kernel gives the same bits whatever the number of threads: a row is summed by
one thread, in the order of its edges.
The functions here take tensors of any leading dimensions, as the references do, and hand addresses to kernels.
Numba is imported by the first call, not with the package.

Shapes: T tasks, N rows, M columns, E edges, F features, H heads, D features of a head.
"""

from __future__ import annotations

from weft.ops.cpu.calls import (
    attention_backward,
    attention_forward,
    attention_v2_backward,
    attention_v2_forward,
    bias_act_dropout,
    bias_act_dropout_backward,
    edge_softmax,
    edge_softmax_backward,
    sddmm,
    serves,
    spmm,
    spmm_max,
    spmm_max_backward,
)

__all__ = [
    "attention_backward",
    "attention_forward",
    "attention_v2_backward",
    "attention_v2_forward",
    "bias_act_dropout",
    "bias_act_dropout_backward",
    "edge_softmax",
    "edge_softmax_backward",
    "sddmm",
    "serves",
    "spmm",
    "spmm_max",
    "spmm_max_backward",
]
