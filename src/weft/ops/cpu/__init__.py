"""CPU kernels for float32 and float64, compiled by numba; the torch references serve every other type.

Chosen by measurement (``benchmarks/suites/on_cpu/cpu_ops.py``, figures in ``results/cpu_ops.json``). On two cores
they are faster than the torch references by: spmm 9 to 130 times, bias + relu + dropout 10 to 50, attention 7 to 33,
softmax 3 to 6, elu 0.8 to 1.5. MKL's CSR product takes 0.6 (cora, F = 7) to 2.7 times (facebook, F = 64) as long as
spmm here; it is not used, because it wins by 20 us at most and needs one multiplied-out value per edge.
Results are bit-identical for any number of threads: a row is summed by one thread, in the order of its edges.
The functions here take tensors of any leading dimensions, as the references do, and pass addresses to kernels.
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
