"""How many times as long phases typically take beside each other, for pairs that were not measured.

As profiled on an H200 with 14 threads of the host (SAGE, benchmarks/results/division.json).
"""

from __future__ import annotations

# Reads over PCIe by kernels hold up the memory accesses of training. Sampling beside copies waits for them: from the
# phases of divided epochs.
INTERFERENCE: dict[str, dict[str, float]] = {
    "batching_cpu": {"transfer_pcie": 1.05, "batching_gpu": 1.02, "transfer_gpu": 1.03, "training_gpu": 1.03},
    "transfer_pcie": {"batching_cpu": 1.03, "transfer_gpu": 1.68},
    "batching_gpu": {"batching_cpu": 1.56, "training_gpu": 1.2, "transfer_pcie": 4.0},
    "transfer_gpu": {"batching_cpu": 1.2, "training_gpu": 1.25, "transfer_pcie": 1.94},
    "training_gpu": {"batching_cpu": 1.1, "transfer_pcie": 1.07, "batching_gpu": 1.8, "transfer_gpu": 3.6},
}
# Inside of captured steps reads by all multiprocessors take nearly all of the bus: from the phases of divided epochs.
INSIDE: dict[str, dict[str, float]] = {
    "transfer_gpu": {"transfer_pcie": 1.1},
    "transfer_pcie": {"transfer_gpu": 5.0},
}


def typical(key: str, beside: str) -> float:
    """How many times as long ``key`` takes while ``beside`` runs; 1 if nothing is known of them."""
    return INTERFERENCE.get(key, {}).get(beside, 1.0)
