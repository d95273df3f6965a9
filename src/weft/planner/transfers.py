"""Seconds that sampling, fetching and transfers add to an epoch of sampled training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.core.batch_sizes import ExpectedBatch, expected_batch
from weft.core.cost import Cost
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.placement import DataPlacement
from weft.core.task import Task

# Of the rates of a machine, on an H200: 519,000 rows of 400 bytes over PCIe at 42.8 of 55.2 GB/s in training
# (benchmarks/results/division.json; 734,000 by themselves at 47.0), on the device at 1,700 of 4,260 GB/s of a copy
# (benchmarks/results/sampling.json).
OVER_PCIE, ON_DEVICE = 0.78, 0.4
# A GPU finds rows quickly in 2 GiB of host memory. Beyond, each is a walk through page tables: 230,000 rows of 512
# bytes out of 1, 4, 16 and 32 GiB took an H200 2.4, 5.7, 7.7 and 8.1 ms; sorted ids 7.0, huge pages as long.
PAGES_REACH, PLACES_A_SECOND = 2 << 30, 2.7e7
SAMPLED_BYTES = 64  # of memory traffic per picked edge: 0.13 ms for the 0.85 M edges of a batch there
PCIE_READ = 40  # bytes over PCIe per picked edge: edges in host memory added 0.78 ms for 0.85 M of them
ID_BYTES = 4  # of a neighbour
LAUNCHES = 20  # kernels per hop: 12 that sample and compact, 8 that make the block's factors and work list
TRANSPOSE_LAUNCHES = 32  # of a hop that has a gradient: 22 operators, one of them a sort of 8 passes and more
# The GPU gathers over PCIe with so many reads in flight that concurrent training stands still: in two runs a step took
# 7.0 and 7.1 ms one after the other, 7.2 and 7.6 overlapped, with 4.9 ms of gathering
# (benchmarks/results/sampled_epoch.json). So it hides nothing and costs a little.
HIDDEN_BY_OVERLAP = -0.17  # the mean of both, of the shorter of gathering and training
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}
HOST_SECONDS_AN_EDGE = 2.6e-8  # a thread that samples: 22.5 ms for 0.85 M edges there
USUAL_DISK = 1e9


@dataclass(frozen=True)
class BatchTraffic:
    """One step besides training: the batch, bytes of a row, of all rows and of all edges, and the share cached."""

    batch: ExpectedBatch
    row_bytes: int
    all_bytes: float
    edge_bytes: float
    hits: float = 0.0

    @classmethod
    def of(cls, task: Task, stats: GraphStats, placement: DataPlacement) -> BatchTraffic:
        """Of a step of ``task``."""
        batch = expected_batch(stats, task.fanouts, min(task.batch, max(stats.num_train, 1)))
        size = row_bytes(task, stats)
        rows = cached_rows(placement, stats, size)
        hits = batch.hit_rate(rows) if rows else 0.0
        return cls(batch, size, float(size * stats.num_nodes), float(ID_BYTES * stats.num_edges), hits)

    @property
    def moved_bytes(self) -> float:
        """Bytes of features that a step reads from where they lie."""
        return self.batch.nodes * self.row_bytes * (1.0 - self.hits)

    def features_by_gpu(self, rate: float) -> float:
        """Seconds in which a GPU reads them over PCIe at ``rate`` bytes per second at most."""
        rows = self.batch.nodes * (1.0 - self.hits)
        return read_by_gpu(self.moved_bytes, rows, self.all_bytes, rate)

    def edges_by_gpu(self, rate: float) -> float:
        """The same of the neighbour lists that it samples from."""
        return read_by_gpu(sum(self.batch.edges) * PCIE_READ, sum(self.batch.rows), self.edge_bytes, rate)


def read_by_gpu(moved: float, positions: float, span: float, rate: float) -> float:
    """Seconds in which a GPU reads ``moved`` bytes at so many random ``positions`` of ``span`` bytes of host memory."""
    near, alone = min(1.0, PAGES_REACH / max(span, 1.0)), moved / rate
    return max(alone, near * alone + (1.0 - near) * positions / PLACES_A_SECOND)


def row_bytes(task: Task, stats: GraphStats) -> int:
    """Bytes of a node's features as a batch has them."""
    return stats.num_features * ELEMENT_BYTES[task.precision]


def cached_rows(placement: DataPlacement, stats: GraphStats, size: int) -> float:
    """Rows that the cache has room for, next to its table by node."""
    if placement.features != "cached":
        return 0.0
    return max(0.0, (placement.cache_bytes - 4 * stats.num_nodes) / max(size, 1))


def with_batches(cost: Cost, task: Task, stats: GraphStats, placement: DataPlacement, machine: Machine) -> Cost:
    """``cost`` with what sampling and fetching add: on the device to its own time, over PCIe during or after it."""
    steps = -(-max(stats.num_train, 1) // task.batch)
    traffic = BatchTraffic.of(task, stats, placement)
    if machine.device != "cuda":
        moved = 2 * traffic.batch.nodes * traffic.row_bytes / machine.copy_bandwidth
        sampled = sum(traffic.batch.edges) * HOST_SECONDS_AN_EDGE / max(machine.host.cores, 1)
        host = steps * (moved + sampled)
        return replace(cost, seconds=_plus(cost.seconds, "cpu", host), phases=_plus(cost.phases, "fetch", host))
    # A step's sampling, and gathering of rows that are on the device.
    hops = len(task.fanouts)
    near = traffic.hits if placement.features == "cached" else float(placement.features == "gpu")
    gathered = near * traffic.batch.nodes * traffic.row_bytes / (ON_DEVICE * machine.copy_bandwidth)
    sampled = 0.0
    if placement.topology != "disk":
        sampled = sum(traffic.batch.edges) * SAMPLED_BYTES / machine.copy_bandwidth
        sampled += batch_launches(hops) * machine.replay_seconds
    on_device = gathered + sampled
    device = steps * on_device
    # A step's reads over PCIe or from disk.
    rate = OVER_PCIE * (machine.bus_bandwidth("host", "gpu:0") or machine.copy_bandwidth)
    total = 0.0
    if placement.features in ("host", "cached"):
        total += traffic.features_by_gpu(rate)
    elif placement.features == "disk":
        disk = machine.link("disk", "disk", "host")
        total += traffic.moved_bytes / min(disk.bytes_per_second if disk is not None else USUAL_DISK, rate)
    if placement.topology in ("host", "cached"):
        total += traffic.edges_by_gpu(rate)
    elif placement.topology == "disk":
        total += sum(traffic.batch.edges) * HOST_SECONDS_AN_EDGE
    away, resource = steps * total, "pcie" if placement.read_by_gpu else "disk"
    trained = sum(value for phase, value in cost.phases.items() if phase != "evaluation") + device
    # Training continues during all of a copy by the CPU, and hardly during the GPU's own reads.
    hidden = min(away, trained) * (HIDDEN_BY_OVERLAP if placement.read_by_gpu else 1.0) if placement.overlap else 0.0
    charged = away - hidden
    seconds, phases = _plus(cost.seconds, "gpu", device), _plus(cost.phases, "fetch", device)
    families, uncorrected = (_plus(part, "scatter", device) for part in (cost.families, cost.uncorrected))
    if charged:
        seconds, phases = _plus(seconds, resource, charged), _plus(phases, "transfer", charged)
    return replace(cost, seconds=seconds, phases=phases, families=families, uncorrected=uncorrected)


def _plus(amounts: Mapping[str, float], key: str, amount: float) -> dict[str, float]:
    return {**amounts, key: amounts.get(key, 0.0) + amount}


def batch_launches(hops: int) -> int:
    """Kernels that sample a batch and transpose its hops, except the outermost: features have no gradient."""
    return hops * LAUNCHES + (hops - 1) * TRANSPOSE_LAUNCHES
