"""Phase times of a sampled task from a machine's rates, for plans before anything was measured."""

from __future__ import annotations

from weft.core.cost import Cost
from weft.core.division import PhaseTime, PhaseTimes
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.placement import Placement
from weft.core.task import Task
from weft.planner.sampling.transfers import (
    HOST_SECONDS_AN_EDGE,
    LAUNCHES,
    ON_DEVICE,
    OVER_PCIE,
    PCIE_READ,
    SAMPLED_BYTES,
    BatchTraffic,
)

# One thread of the H200's host gathers 400-byte rows at about this rate; sixteen together reach 43 GB/s
# (benchmarks/results/sampling.json), and sampling by sixteen threads takes 0.13 of one's time instead of 0.0625.
HOST_GATHER = 6e9
CROWDING = 0.07
INDEX_BYTES = 8  # of a picked edge and its offsets, in a batch that is copied


def predicted_times(
    task: Task, stats: GraphStats, machine: Machine, placement: Placement, training: Cost, steps: int
) -> PhaseTimes:
    """Phases of a batch of ``task``; ``training``: predicted cost of an epoch of ``steps`` without batches."""
    traffic = BatchTraffic.of(task, stats, placement)
    rows, edges = traffic.batch.nodes, sum(traffic.batch.edges)
    whole = rows * traffic.row_bytes
    trained = sum(value for phase, value in training.phases.items() if phase != "evaluation") / max(steps, 1)
    phases = {
        "batching_cpu": edges * HOST_SECONDS_AN_EDGE + whole / HOST_GATHER,
        "transfer_pcie": (whole + edges * INDEX_BYTES) / _bus(machine),
        "batching_gpu": _sampling(edges, placement, machine, len(task.fanouts)),
        "transfer_gpu": _reading(traffic, placement, machine),
        "training_gpu": trained,
    }
    found = {key: PhaseTime(seconds) for key, seconds in phases.items()}
    return PhaseTimes(found, crowding=CROWDING, bytes=int(whole + edges * INDEX_BYTES))


def _bus(machine: Machine) -> float:
    link = machine.link("pcie", "host", "gpu:0")
    return link.bytes_per_second if link is not None else machine.copy_bandwidth


def _sampling(edges: float, placement: Placement, machine: Machine, hops: int) -> float:
    over_bus = edges * PCIE_READ / (OVER_PCIE * _bus(machine)) if placement.topology != "gpu" else 0.0
    return edges * SAMPLED_BYTES / machine.copy_bandwidth + hops * LAUNCHES * machine.replay_seconds + over_bus


def _reading(traffic: BatchTraffic, placement: Placement, machine: Machine) -> float:
    whole = traffic.batch.nodes * traffic.row_bytes
    near = {"gpu": 1.0, "cached": traffic.hits}.get(placement.features, 0.0)
    on_device = near * whole / (ON_DEVICE * machine.copy_bandwidth)
    return on_device + (1.0 - near) * whole / (OVER_PCIE * _bus(machine))
