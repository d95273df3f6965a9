"""Phase times of a sampled task from a machine's rates, for plans before anything was measured."""

from __future__ import annotations

from weft.core.cost import Cost
from weft.core.division import INSIDE, INTERFERENCE, PhaseTime, PhaseTimes
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.placement import DataPlacement
from weft.core.task import Task
from weft.planner.transfers import (
    HOST_SECONDS_AN_EDGE,
    ON_DEVICE,
    OVER_PCIE,
    SAMPLED_BYTES,
    BatchTraffic,
    batch_launches,
)

# One thread of the H200's host prepares a batch of 519,000 rows of 400 bytes and 0.85 M edges in 81 to 90 ms, of which
# sampling takes 22; fourteen at once take 116 to 123 ms each, of 544 MB 1.5 times as long as one
# (benchmarks/results/division.json).
HOST_GATHER = 3.2e9
CROWDING = 0.03
MEASURED_WITH = 14  # threads of the host
LAUNCHED = 2.4e-4  # seconds per hop that launching its kernels one by one adds: 0.85 ms against 0.13, three hops
COPIED = 4.2e-4  # seconds of a transfer beyond its bytes: 4.37 ms for 218 MB there, at 55.2 GB/s
COMPLETED = 2.5e-4  # of the kernels that add rows from a cache, launched one by one
INDEX_BYTES = 8  # of a picked edge and its offsets, in a batch that is copied


def predicted_times(
    task: Task, stats: GraphStats, machine: Machine, placement: DataPlacement, training: Cost, steps: int
) -> PhaseTimes:
    """Phases of a batch of ``task``; ``training``: predicted cost of an epoch of ``steps`` without batches."""
    traffic, device = BatchTraffic.of(task, stats, placement), machine.copy_bandwidth
    bus = machine.bus_bandwidth("host", "gpu:0") or device
    rows, edges, hops = traffic.batch.nodes, sum(traffic.batch.edges), len(task.fanouts)
    cached = traffic.hits if placement.features == "cached" else 0.0  # of the rows: neither side reads those by bus
    read = rows * traffic.row_bytes
    whole = read * (1.0 - cached)
    trained = sum(value for phase, value in training.phases.items() if phase != "evaluation") / max(steps, 1)
    # The GPU adds the rows of its cache to a batch of the host's.
    completing = COMPLETED + cached * rows * traffic.row_bytes / (ON_DEVICE * device) if cached else 0.0
    sampled = edges * SAMPLED_BYTES / device + batch_launches(hops) * machine.replay_seconds
    sampled += traffic.edges_by_gpu(OVER_PCIE * bus) if placement.topology != "gpu" else 0.0
    near = 1.0 if placement.features == "gpu" else cached
    reading = near * read / (ON_DEVICE * device)
    phases = {
        "batching_cpu": edges * HOST_SECONDS_AN_EDGE + whole / HOST_GATHER,
        "transfer_pcie": (whole + edges * INDEX_BYTES) / bus + COPIED + completing,
        "batching_gpu": sampled + hops * LAUNCHED,
        "transfer_gpu": reading + (traffic.features_by_gpu(OVER_PCIE * bus) if near < 1.0 else 0.0),
        "training_gpu": trained,
    }
    times = {key: PhaseTime(seconds) for key, seconds in phases.items()}
    captured = times | {"batching_gpu": PhaseTime(sampled)}
    captured = {key: time for key, time in captured.items() if key.endswith("_gpu")}
    return PhaseTimes(times, INTERFERENCE, CROWDING, int(whole + edges * INDEX_BYTES), captured, MEASURED_WITH, INSIDE)
