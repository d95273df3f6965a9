"""Predict the seconds of an epoch: a roofline over a Program with a Machine's rates.

An operator takes as long as the slowest of what it does: its traffic in order at the rate of a copy, its rows fetched
by index at the rate of a gather, its arithmetic at the rate of a product; and every kernel has a fixed cost on top. In
a captured CUDA graph that is all. An eager step also takes the host's time, which hides behind the device's if that is
longer. On a CPU the host is the device, and every operator costs its call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.core.cost import Cost
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import FILLS_DEVICE
from weft.core.program import Operator, Program, Value
from weft.planner.cost.calibration import Calibration

# ---- Rows gathered by index, by their width and the share of cache hits
#
# A kernel processes the features of all rows in tiles, so a tile of every row has to stay in the cache, not the
# whole matrix. If even that is too much, a skewed graph still keeps its busiest rows there: with the degrees of
# ogbn-products a few per cent of the rows are most of the fetches.

TILE_BYTES = 256  # 64 features of float32, the tile of the SpMM kernels
USABLE_CACHE = 0.5  # the rest holds indices, results, and what the two halves of a large cache keep twice
VECTOR_BYTES = 16  # what one lane loads at once, if rows begin at multiples of it
# Rows that do not are loaded number by number. Among the measured epochs (benchmarks/results/epoch.json) only those of
# the products shape aggregate many such rows (47 classes, 188 bytes), and they come out a third too short unless these
# count double; those of the other shapes come out right.
UNALIGNED = 2.0
# A table this small stays in the first-level cache of every multiprocessor: weights that sparse features pick among.
# The epochs of the pubmed shape (benchmarks/results/estimates.json) fit about this factor.
NEAR_BYTES = 192 << 10
NEARER = 2.5


def gather_seconds(
    gather_bytes: float, row_bytes: float, rows: int, machine: Machine, stats: GraphStats | None = None
) -> float:
    """Seconds to fetch ``gather_bytes`` in rows of ``row_bytes`` out of a table of ``rows``."""
    if machine.device == "cuda" and row_bytes % VECTOR_BYTES:
        gather_bytes *= UNALIGNED
    if machine.device == "cuda" and rows * row_bytes <= NEAR_BYTES:
        return gather_bytes / (NEARER * machine.gather_rate(row_bytes, cached=True))
    hot = cached_share(min(row_bytes, TILE_BYTES), rows, machine, stats)
    cached, cold = (machine.gather_rate(row_bytes, cached=where) for where in (True, False))
    return gather_bytes * (hot / cached + (1.0 - hot) / cold)


def cached_share(tile_bytes: float, rows: int, machine: Machine, stats: GraphStats | None = None) -> float:
    """Share of the fetches that find their row's tile in the cache, the busiest rows being kept there."""
    room = USABLE_CACHE * machine.l2_bytes / max(tile_bytes, 1.0)
    if room >= rows or rows <= 0:
        return 1.0
    if stats is None or not stats.symmetric or rows != stats.num_nodes or not stats.degree_histogram:
        # Degrees are in-degrees: of a directed graph they do not say which sources are busy.
        return room / rows
    return edges_of_busiest(stats, room) / max(stats.num_edges, 1)


def edges_of_busiest(stats: GraphStats, nodes: float) -> float:
    """How many edges start at the ``nodes`` busiest nodes, from the histogram of degrees."""
    bins = []
    for length, count in enumerate(stats.degree_histogram):
        # The mean of the degrees with that bit length, their density falling as a power law's: low ones prevail.
        low, high = (1 << length) // 2, (1 << length) - 1
        bins.append(count * (1.4 * low if high <= stats.max_degree else (low + max(stats.max_degree, low)) / 2))
    scale = stats.num_edges / max(sum(bins), 1.0)
    edges = 0.0
    for length in range(len(bins) - 1, -1, -1):
        count = stats.degree_histogram[length]
        if nodes <= count:
            return edges + scale * bins[length] * nodes / max(count, 1)
        edges, nodes = edges + scale * bins[length], nodes - count
    return edges


# ---- Operators

# Families of operators that share a factor of another family.
TIMED_AS = {"gather": "scatter", "reduction": "pointwise", "allocation": "pointwise"}
# By how much kernels stay behind the rates of a machine, where that is known. Attention computes more an edge than it
# fetches: on the H200 it gathered 4 TB/s where SpMM reached 8 (GAT of 5 to 9 layers on the artist, proteins and pubmed
# shapes, benchmarks/results/estimates.json; in one pass it takes an eighth less since). Torch's scatters add
# atomically: PyG's eager epochs on the arxiv and products shapes (benchmarks/results/epoch.json) come out right with
# this factor, GAT's alone still too short.
EFFICIENCY = {"attention": 2.0, "scatter": 2.8}
EFFICIENCY_ON_CPU = {"attention": 3.5, "scatter": 2.8}
# Torch's layer norm gives every row a block of its own on a GPU, however short it is: what counts are rows, not bytes.
# Seconds a row, from random modules with and without one (benchmarks/results/estimates.json, H200), by direction.
ROW_SECONDS = {"native_layer_norm": 1.0e-9, "native_layer_norm_backward": 4.0e-9}
H200_SMS = 132
# Weft's own products over the rate of a library's large one, in tf32 or bf16: of rows, and those whose inner dimension
# is the rows (weight gradients). On the H200 linear kernels of SAGE 3 x 256 reach 47 TFLOP/s in fp32, 95 in tf32 and
# 137 in bf16, weight gradients 33 (one task) to 42 (eight), 56 and 269 (benchmarks/results/sampled_epoch.json);
# 169,343 rows of 64 to 64 take 0.032 ms, 43 TFLOP/s.
OWN_PRODUCTS = {"fp32": ("tf32", 0.215, 0.165), "tf32": ("tf32", 0.43, 0.255), "bf16": ("bf16", 0.22, 0.43)}
WITHOUT_TENSOR_CORES = 0.3  # of fp32's rate, which they reach at least
INDICES = ("int64", "int32", "bool")
# Of the seconds of concurrent streams that still add up, on an H200 (benchmarks/results/settings.json): six tasks on
# the demo graph take 0.370 ms (0.785 in turn), with evaluations 0.518 (1.10), GCN of 2, 2, 3 and 4 layers on the pubmed
# shape 0.426 (0.616). On the arxiv shape, whose kernels fill the device, nothing was gained.
LAUNCHES_BESIDE, WORK_BESIDE = 0.45, 0.67
ITEM_BYTES = {"float64": 8, "int64": 8, "bfloat16": 2, "float16": 2, "bool": 1, "uint8": 1, "int8": 1}


@dataclass(frozen=True)
class PaddingShare:
    """Shares of a padded batch that exist: nodes whose features are read, rows that are computed, and edges."""

    nodes: float = 1.0
    rows: float = 1.0
    edges: float = 1.0


FULL = PaddingShare()


@dataclass(frozen=True)
class RunMode:
    """How the step will be run, as far as its time depends on it.

    ``steps``: how often per epoch; ``chunks``: how many times an evaluation runs what was captured of it, and
    ``chunk_padding_share``: how much of that one of them has on average. ``padding_share``: what exists of the batch
    that was captured; a GPU computes the other rows as well, and neither follows edges that are not there.
    """

    precision: str = "fp32"
    replay: bool = True
    threads: int | None = None
    eval_every: int = 1
    steps: int = 1
    chunks: int = 1
    padding_share: PaddingShare = FULL
    chunk_padding_share: float = 1.0

    def runs(self, phase: str) -> float:
        """How often a phase runs per epoch."""
        return self.chunks / self.eval_every if phase == "evaluation" else float(self.steps)


def family(op: Operator) -> str:
    """Which operators are off by the same factor.

    ``attention`` and ``spmm`` are Weft's kernels, ``scatter`` is torch's indexing of rows (PyG's layers), then
    ``matmul`` and ``pointwise``.
    """
    return TIMED_AS.get(op.family, op.family)


def seconds(
    program: Program,
    machine: Machine,
    calibration: Calibration | None = None,
    *,
    stats: GraphStats | None = None,
    mode: RunMode | None = None,
) -> Cost:
    """Seconds of one epoch of ``program`` on ``machine``, by resource, by family and by phase.

    ``stats`` has the skew of the degrees. The evaluation counts once in ``eval_every`` epochs; a program
    without one is taken to evaluate by another forward pass.
    """
    plain, clock = epoch_clocks(program, machine, calibration, stats, mode or RunMode())
    return Cost(
        seconds=clock.resources,
        families=clock.families,
        phases=clock.phases,
        corrected=calibration is not None and bool(calibration.observations),
        uncorrected=plain.families,
        launches=clock.launches,
    )


def epoch_clocks(
    program: Program, machine: Machine, calibration: Calibration | None, stats: GraphStats | None, mode: RunMode
) -> tuple[EpochClock, EpochClock]:
    """An epoch of ``program``: uncorrected, and with the corrections that hold for one of its length."""
    plain = EpochClock(program, machine, Calibration(), stats, mode)
    if calibration is None:
        return plain, plain
    corrections = calibration.for_epoch(sum(plain.families.values()))
    return plain, EpochClock(program, machine, corrections, stats, mode)


class EpochClock:
    """Adds up the operators of one epoch.

    ``resources``: seconds by resource; ``waiting``: those in which the device waits for the host.
    """

    def __init__(
        self, program: Program, machine: Machine, calibration: Calibration, stats: GraphStats | None, mode: RunMode
    ) -> None:
        self.program, self.machine, self.calibration = program, machine, calibration
        self.stats, self.mode = stats, mode
        self.families: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self.device = self.host = self.waiting = self.launches = 0.0
        self._cpu, self._launch_factor = machine.device == "cpu", calibration.factor("launch")
        # One thread of a CPU has less than all of the machine's rates.
        self._speed = machine.host.one_thread if self._cpu and mode.threads == 1 else 1.0
        by_stream: dict[int, list[float]] = {}  # seconds of work and of launches
        has_evaluation = any(op.phase == "evaluation" for op in program.operators)
        for op in program.operators:
            as_evaluation = ("evaluation",) if op.phase == "forward" and not has_evaluation else ()
            for phase in (op.phase, *as_evaluation):
                runs, (work, fixed) = mode.runs(phase), self.seconds_of(op, phase)
                self._count(family(op), phase, work)
                self._count("launch", phase, fixed)
                self.device += work + fixed
                spent = by_stream.setdefault(op.stream, [0.0, 0.0])
                spent[:] = spent[0] + work, spent[1] + fixed
                self.launches += op.launches * runs
                self.host += self._call(op) * self._launch_factor * runs if op.launches else 0.0
        if machine.device == "cuda" and mode.replay and len(by_stream.keys() - {0}) > 1:
            fills = stats is not None and stats.num_edges >= FILLS_DEVICE
            remaining = overlapped_seconds(by_stream, 1.0 if fills else WORK_BESIDE) / max(self.device, 1e-12)
            self.device *= remaining
            self.families, self.phases = (
                {name: remaining * part for name, part in parts.items()} for parts in (self.families, self.phases)
            )
        if machine.device == "cuda" and mode.replay:
            self._count("launch", "forward", machine.launch_seconds * self._launch_factor)
            self.device += machine.launch_seconds * self._launch_factor
        self.resources = {"cpu" if self._cpu else "gpu": self.device}
        if not self._cpu and not mode.replay and self.host > self.device:
            self.waiting = self.host - self.device  # what the host needs beyond the device is the CPU's
            self._count("launch", "forward", self.waiting)
            self.resources["cpu"] = self.waiting

    def seconds_of(self, op: Operator, phase: str) -> tuple[float, float]:
        """Corrected seconds of an operator per epoch, in a phase: without its launches, and of its launches."""
        runs, launch = self.mode.runs(phase), op.launches * self.machine.replay_seconds
        if self._cpu:
            launch = self._call(op) if op.launches else 0.0
        # What was captured of an evaluation is the largest of its chunks.
        share = self.mode.chunk_padding_share if phase == "evaluation" else 1.0
        work = self._work(op) * self.calibration.factor(family(op)) * runs * share
        return work, launch * self._launch_factor * runs

    def _count(self, name: str, phase: str, amount: float) -> None:
        if amount <= 0:
            return
        self.families[name] = self.families.get(name, 0.0) + amount
        self.phases[phase] = self.phases.get(phase, 0.0) + amount

    def _call(self, op: Operator) -> float:
        return self.machine.custom_op_seconds if op.name.startswith("weft") else self.machine.op_seconds

    def _work(self, op: Operator) -> float:
        share = FULL if op.phase == "evaluation" else self.mode.padding_share  # the rows of evaluations all exist
        moved = op.stream_bytes / self.machine.copy_bandwidth
        parts = [part * (share.rows if self._cpu else 1.0) for part in (moved, op.flops / self._flop_rate(op))]
        each = 0.0 if self._cpu or not op.reads else ROW_SECONDS.get(op.name.rpartition(".")[2], 0.0)
        if each:  # what an operator takes for every row, however short
            shape = max((self.program.values[i] for i in op.reads), key=lambda value: value.bytes).shape
            parts.append(each * math.prod(shape[:-1]) * H200_SMS / (self.machine.sms or H200_SMS))
        if op.gather_bytes:
            gathered = self._gather(op) * share.edges
            if family(op) == "spmm" and not self._cpu:
                # Rows come from memory once before they come from the cache: it matters if nodes have few neighbours.
                touched = table_bytes(op, self.program) / self.machine.copy_bandwidth * share.nodes
                gathered += moved + touched
            parts.append(gathered)
        return max(parts) * self._efficiency(op) / self._speed

    def _efficiency(self, op: Operator) -> float:
        """By how much a kernel stays behind the rates of the machine."""
        name = family(op)
        if self._cpu:
            return EFFICIENCY_ON_CPU.get(name, 1.0)
        factor = EFFICIENCY.get(name, 1.0)
        if name != "attention" or self.stats is None:
            return factor
        # Features of one head: the last dimension of what has nodes, heads and features.
        shapes = [self.program.values[i].shape for i in (*op.writes, *op.reads)]
        width = next((s[-1] for s in shapes if len(s) >= 3 and s[-3] == self.stats.num_nodes), 0)
        if not width:
            return factor
        # What attention adds to its fetches is arithmetic: half precision does not halve it, and padding lanes
        # do no useful work.
        size = 2 if self._low(op) else 4
        padded = 2.0 ** math.ceil(math.log2(width)) / width
        fetched = UNALIGNED if width * size % VECTOR_BYTES else 1.0
        return fetched + (factor - 1.0) * padded * 4 / size

    def _gather(self, op: Operator) -> float:
        rows, width = table_of(op, self.program, self.stats)
        together = gather_seconds(op.gather_bytes, width, rows, self.machine, self.stats)
        if self.machine.device == "cuda" or self.stats is None:
            return together  # hubs are cut into pieces, so no program waits for one
        # A row is summed by one thread of a CPU: the largest hub is a floor.
        hub = op.gather_bytes * self.stats.max_degree / max(self.stats.num_edges, 1)
        alone = gather_seconds(hub, width, rows, self.machine, self.stats) / self.machine.host.one_thread
        return max(together, alone * self._speed)

    def _low(self, op: Operator) -> bool:
        return any(self.program.values[i].dtype in ("bfloat16", "float16") for i in op.reads)

    def _flop_rate(self, op: Operator) -> float:
        precision = "bf16" if self._low(op) else "fp32" if self.mode.precision == "bf16" else self.mode.precision
        if op.name.startswith("weft") and self.machine.device == "cuda":
            units, rows, tall = OWN_PRODUCTS[precision]
            share = tall if op.name.endswith("weight_grad") else rows
            least = WITHOUT_TENSOR_CORES * self.machine.matmul_rate("fp32")
            return max(share * self.machine.matmul_rate(units), least)
        return self.machine.matmul_rate(precision)


def overlapped_seconds(by_stream: Mapping[int, Sequence[float]], work_share: float) -> float:
    """Seconds of streams of which all but the first (0) run at once; each has seconds of work and of launches.

    ``work_share``: of the work of all, that which adds up because kernels share the device.
    """
    side = [spent for stream, spent in by_stream.items() if stream]
    together = sum(work_share * work + LAUNCHES_BESIDE * launches for work, launches in side)
    return sum(by_stream.get(0, ())) + max(together, *(work + launches for work, launches in side))


def table_of(op: Operator, program: Program, stats: GraphStats | None) -> tuple[int, float]:
    """Rows of the matrix that ``op`` fetches from, and bytes of a row of one task.

    It is the largest thing the operator reads that is neither the graph nor an index. Weights are parts of one long row
    a task: where features are sparse and pick among them, there are as many rows as features.
    """
    tables = _tables(op, program)
    if stats is not None:
        # What has a number per stored feature or edge, such as features after dropout, has no rows to fetch.
        counts = (stats.feature_nnz, stats.num_edges, stats.num_edges + stats.num_nodes)
        tables = [value for value in tables if not any(size in counts for size in value.shape)]
    if not tables:
        return (stats.num_nodes if stats else 1), 256.0
    value = max(tables, key=lambda value: value.bytes)
    if value.kind == "weight" and stats is not None and stats.feature_nnz:
        return stats.num_features, op.gather_bytes / (stats.feature_nnz * program.tasks)
    # Rows are counted by the dimension as long as the graph has nodes, else the last but one.
    by_nodes = stats is not None and stats.num_nodes in value.shape[:-1]
    dimension = value.shape.index(stats.num_nodes) if stats is not None and by_nodes else len(value.shape) - 2
    return value.shape[dimension], float(math.prod(value.shape[dimension + 1 :]) * ITEM_BYTES.get(value.dtype, 4))


def table_bytes(op: Operator, program: Program) -> int:
    """Bytes of the matrix that ``op`` fetches from, all tasks together; weights are no matter."""
    tables = [value.bytes for value in _tables(op, program) if value.kind != "weight"]
    return max(tables, default=0)


def _tables(op: Operator, program: Program) -> list[Value]:
    read = [program.values[i] for i in op.reads]
    return [v for v in read if v.kind != "graph" and len(v.shape) >= 2 and v.dtype not in INDICES]
