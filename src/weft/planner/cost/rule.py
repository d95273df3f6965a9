"""Estimate one epoch of a task roughly, from its settings alone: bytes, multiply-adds and kernel launches.

Good to a factor of about two, which is enough to weigh padding against launches; the real estimate reads a
captured program. Shapes: N nodes, E edges, F features in, H hidden, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.models import BUILT_IN, ModelTraits
from weft.core.task import Task

LAUNCHES_AROUND = 10  # loss, update, evaluation, book-keeping
ROWS_TOUCHED = 6  # passes over a layer's [N, H] that are not part of an aggregation
BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}

# Memory by rule of thumb, from 5 % below to 70 % above the captured estimate for 1 and 8 tasks of 3 to 7 layers, all
# models, norms and precisions, on the pubmed, arxiv, products and amazon0601 shapes.
ROWS_KEPT = 2.0
KEPT_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.75}  # some of what bf16 keeps is float32
NORM_KEPT = {"cpu": 0.65, "cuda": 0.2}  # a GPU keeps a norm's input, and no output
SAVED_HEADS = 8  # rows of the last layer's heads that are there at once, at most
SPARE = 1.1  # as an estimate has, and a little for what a rule does not know
LIBRARIES = 640 << 20  # context, workspaces of cuBLAS


@dataclass(frozen=True)
class EpochWork:
    """One epoch of one task: bytes moved, multiply-adds, and kernels (or operator calls) launched."""

    bytes: float
    flops: float
    launches: int

    def seconds(self, rates: Rates) -> float:
        """What a device with ``rates`` needs for the work itself, launches aside."""
        return self.bytes / rates.bandwidth + self.flops / rates.flops


@dataclass(frozen=True)
class Rates:
    """A device in four numbers: bytes/s, multiply-adds/s, seconds of one launch, bytes of the last cache."""

    bandwidth: float
    flops: float
    launch: float
    cache: int


# A mid-range GPU replaying a CUDA graph, and two cores with an operator call and its backward from Python.
DEFAULT_RATES = {
    "cuda": Rates(bandwidth=2e12, flops=2e13, launch=3e-6, cache=40 << 20),
    "cpu": Rates(bandwidth=1.5e10, flops=5e10, launch=6e-5, cache=32 << 20),
}


def rates_of(device: str, machine: Machine | None, precision: str) -> Rates:
    """The rates of ``machine``, or defaults for the kind of device."""
    if machine is None:
        return DEFAULT_RATES[device]
    launch = machine.replay_seconds if device == "cuda" else machine.custom_op_seconds or machine.op_seconds
    fallback = DEFAULT_RATES[device]
    return Rates(
        bandwidth=machine.copy_bandwidth,
        flops=machine.matmul_rate(precision) / 2,
        launch=launch or fallback.launch,
        cache=machine.l2_bytes or fallback.cache,
    )


def widths(task: Task, stats: GraphStats, hidden: int | None = None) -> list[int]:
    """Widths from the features to the classes; ``hidden`` replaces the task's."""
    layers = task.layers if task.traits is not None else 2  # a user's model: two layers are a guess
    inner = task.hidden if hidden is None else hidden
    return [stats.num_features, *[inner] * (layers - 1), max(stats.num_classes, 1)]


def edges_and_loops(stats: GraphStats) -> int:
    """Edges that one pass over the graph visits, including a self loop per node."""
    return stats.num_edges + stats.num_nodes


def feature_values(stats: GraphStats) -> int:
    """Values of the features that are stored."""
    return stats.num_nodes * stats.num_features if stats.feature_nnz is None else stats.feature_nnz


def hidden_bytes(task: Task, stats: GraphStats) -> int:
    """Bytes of the hidden rows of all nodes, which a sparse product gathers from."""
    return stats.num_nodes * task.hidden * BYTES[task.precision]


def _traits(task: Task) -> ModelTraits:
    """The row of the model; a user's model counts as a GCN."""
    return task.traits or BUILT_IN["gcn"]


def work(task: Task, stats: GraphStats, hidden: int | None = None) -> EpochWork:
    """The work of one epoch of ``task``; ``hidden`` replaces its width (padding)."""
    traits = _traits(task)
    size, rows, edges = BYTES[task.precision], aggregated_rows(task, stats), edges_and_loops(stats)
    moved = flops = 0.0
    steps = list(pairwise(widths(task, stats, hidden)))
    for layer, (size_in, size_out) in enumerate(steps):
        values = rows * size_in if layer or traits.relational else feature_values(stats)
        passes = traits.sparse_passes if layer else traits.sparse_passes / 2  # nothing flows back into the features
        moved += size * (passes * edges * min(size_in, size_out) + 3 * values + ROWS_TOUCHED * rows * size_out)
        flops += 3.0 * traits.linear_maps * values * size_out / (task.blocks or 1 if traits.relational else 1)
    return EpochWork(moved, flops, traits.launches * len(steps) + LAUNCHES_AROUND)


def parameters(task: Task, stats: GraphStats) -> int:
    """P, roughly."""
    maps: float = _traits(task).linear_maps  # matrices of a layer
    if _traits(task).relational:  # its own, and the bases, or one (or its blocks) per relation
        maps = 1 + (task.bases if task.bases else stats.num_relations / (task.blocks or 1))
    return sum(int(maps * (a * b + b)) for a, b in pairwise(widths(task, stats)))


def aggregated_rows(task: Task, stats: GraphStats) -> int:
    """Rows that a layer aggregates to: one per node, or one per node and relation."""
    return stats.num_nodes + (stats.relation_rows if _traits(task).relational else 0)


def rule_memory(tasks: list[Task], stats: GraphStats, device: str = "cpu") -> float:
    """Bytes of a group by rule of thumb: the graph once, weights and saved activations of every member; some spare."""
    size = BYTES[tasks[0].precision]
    most = max(aggregated_rows(task, stats) for task in tasks)
    values = feature_values(stats) * (1 if stats.feature_nnz is None else 2)  # sparse features have columns, too
    forms = 2 if stats.symmetric else 4  # of the structure: normalised and transposed
    constant = most * stats.num_features * size if stats.feature_nnz is None else 0
    total = (4.0 * forms * edges_and_loops(stats) + size * values) + constant  # the first aggregation is stored
    if most > stats.num_nodes:
        total += 4.0 * (4 * stats.num_edges + 6 * stats.relation_rows)  # relations, and edges in the order of relations
    for task in tasks:
        rows = sum(widths(task, stats)[1:]) + 2 * max(widths(task, stats)[1:])
        traits = _traits(task)
        saved = traits.kept if task.traits is not None else max(each.kept for each in BUILT_IN.values())
        norms = 0 if task.norm is None else traits.norms
        # Bytes of every value of its rows that a model keeps for the backward pass, more than a GCN does.
        per_value = KEPT_BYTES[task.precision] * ROWS_KEPT * (saved + norms * NORM_KEPT[device])
        total += (
            4.0 * (6 + (task.keep_top or 0)) * parameters(task, stats) + per_value * aggregated_rows(task, stats) * rows
        )
    return SPARE * total + (LIBRARIES if device == "cuda" else 0)


def attention_bytes(tasks: list[Task], stats: GraphStats) -> float:
    """Bytes that heads may take beyond the rule of thumb, which was made for 8 of them: an upper bound.

    A GPU keeps a coefficient of every edge, head and layer and works on two layers' more; the last layer's heads each
    have rows of their own before they are averaged. Of the reddit shape a GAT with 64 heads takes 19 times what the
    rule says.
    """
    total = 0.0
    for task in tasks:
        if task.traits is not None and task.traits.has_heads:
            heads = [*[task.heads] * (task.layers - 1), task.out_heads]
            total += 4.0 * edges_and_loops(stats) * (sum(heads) + 2 * max(heads))
            total += 4.0 * SAVED_HEADS * stats.num_nodes * max(stats.num_classes, 1) * task.out_heads
    return total
