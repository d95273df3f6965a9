"""Decide about a group's step: what is computed once, whether it is captured, the row order, how many threads.

Each function returns the choice and the sentence that explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.compatibility import eager_reason
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import FILLS_DEVICE, GAIN
from weft.core.task import Task
from weft.planner.cost.rule import BYTES, edges_and_loops, feature_values, hidden_bytes

# Multiply-adds of a forward pass from which on more than one thread pays. Below it two threads gained nothing (GCN
# and GAT on 3 graphs, fastest of repeated runs), and on a busy machine they wait for each other: a training on the
# embedded graph took 20 times as long next to one other process.
WORK_FOR_THREADS = 1 << 25
SHARED_CORE = 0.25  # of a core that other processes may take without a thread being left out
MOST_CLUSTERED = 1 << 24  # nodes: finding clusters passes through two arrays of 64 bytes per node
MEMBERS_TO_CLUSTER = 4
REPAID = 2.0  # how far the seconds won must exceed those spent
USUAL_L2 = 50 << 20
# Measured on an H200 (suites spmm, multi_kernels): of the time of sparse products nothing is gained on the pubmed shape
# and for one task on arxiv's, 10 % for 4 tasks and 12 % for 16, 30 to 35 % on products, whose rows do not stay in the
# L2. Finding clusters takes 15 ms for 2.5 M edges and 0.19 s for 124 M, and some seconds the first time on a machine,
# when a kernel is compiled for it.
GAIN_IN_CACHE, GAIN_BEYOND = 0.1, 0.3  # of the seconds of sparse products
GATHERED = 7e12  # bytes per second, from the L2
CLUSTER_SECONDS, CLUSTER_SECONDS_AN_EDGE = 0.1, 1.5e-9


def first_layer(tasks: Sequence[Task], stats: GraphStats) -> tuple[bool, str]:
    """Whether any member's first aggregation is constant: it is computed once for all whose it is.

    Dense features without dropout and an aggregation without weights give the same product in every epoch, which has
    one sparse product less then. Sparse features stay sparse.
    """
    choices = [_first_layer(task, stats) for task in tasks]
    return next((choice for choice in choices if choice[0]), choices[0])


def _first_layer(task: Task, stats: GraphStats) -> tuple[bool, str]:
    traits = task.traits
    if traits is not None and traits.first_layer:
        return False, f"first layer per step: {task.model}'s {traits.first_layer}"
    if traits is not None and "aggregator" in traits.shaping and task.aggregator == "max" and stats.sparse_features:
        return False, "first layer per step: a maximum over sparse features would be dense"
    if traits is not None and task.input_dropout:
        return False, f"first layer per step: input_dropout={task.input_dropout:g} changes the input"
    if stats.sparse_features:
        return False, "first layer per step: the features are sparse, and their aggregate would be dense"
    relational = traits is not None and traits.relational
    values = stats.relation_rows * stats.num_features if relational else stats.num_nodes * stats.num_features
    megabytes = values * 4 / 1e6
    if traits is None:
        return True, "first layer once if the model offers first_aggregate: the features do not change"
    return True, f"first layer's aggregation computed once ({megabytes:,.1f} MB kept): the features do not change"


def replay(tasks: Sequence[Task], device: str) -> tuple[bool, str]:
    """Whether the step is captured as a CUDA graph."""
    eager = next((why for why in map(eager_reason, tasks) if why is not None), None)
    if device == "cuda" and eager is not None:
        return False, f"the step runs eagerly: {eager}"
    if device == "cuda":
        return True, "the step is captured as a CUDA graph and replayed: all its shapes are fixed"
    return False, "the step runs eagerly: a CPU has no kernel launches to save"


def row_order(
    tasks: Sequence[Task], stats: GraphStats, device: str, machine: Machine | None = None
) -> tuple[bool, tuple[str, ...]]:
    """Whether rows of the graph are traversed by cluster; on a GPU only."""
    if device != "cuda":
        return False, ()
    cache = (machine.l2_bytes if machine is not None else 0) or USUAL_L2
    epochs, widest = max(task.epochs for task in tasks), max(hidden_bytes(task, stats) for task in tasks)
    sizes = f"{widest / 1e6:,.0f} MB in a cache of {cache / 1e6:,.0f} MB"
    layers = sum(task.layers * task.hidden * BYTES[task.precision] for task in tasks)
    seconds = 2.0 * layers * edges_and_loops(stats) / GATHERED  # rows that sparse products gather, and their gradients
    won = epochs * seconds * (GAIN_BEYOND if widest > cache else GAIN_IN_CACHE)
    clustered = False
    if stats.num_edges < FILLS_DEVICE:
        why = f"the rows that {stats.num_edges:,} edges gather stay in the cache in any order"
    elif stats.num_nodes > MOST_CLUSTERED:
        why = f"clusters of {stats.num_nodes:,} nodes would take too much memory to find"
    elif widest <= cache and len(tasks) < MEMBERS_TO_CLUSTER:
        why = f"hidden rows of all nodes stay in the cache in any order ({sizes})"
    elif won < REPAID * (CLUSTER_SECONDS + CLUSTER_SECONDS_AN_EDGE * stats.num_edges):
        why = f"{epochs:,} epochs would save {won:.2g} s by clusters, less than finding them takes"
    elif widest > cache:
        clustered = True
        why = f"hidden rows of all nodes do not stay in the cache ({sizes}), those that a cluster gathers do"
    else:
        clustered = True
        why = f"{len(tasks)} members traverse the graph, and rows of a cluster gather the same neighbours"
    return clustered, (f"rows by {'cluster' if clustered else 'length'}: {why}",)


def threads(tasks: Sequence[Task], stats: GraphStats, device: str) -> tuple[int | None, tuple[str, ...]]:
    """How many threads a CPU run gets: one where an epoch of the whole group is too short to share."""
    if device != "cpu":
        return None, ()
    # Of a forward pass: sparse products of every layer, and the first product with the features.
    work = sum(task.hidden * (task.layers * edges_and_loops(stats) + feature_values(stats)) for task in tasks)
    if work >= WORK_FOR_THREADS:
        return None, ()
    if any(task.traits is None for task in tasks):
        sizes = f"{stats.num_nodes:,} nodes and {stats.num_edges:,} edges"
        return 1, (f"one thread: {sizes} are too few to share, as far as sizes tell of a user's module",)
    return 1, (f"one thread: an epoch of about {work / 1e6:.1f} M multiply-adds is too short to share",)


def free_threads(most: int, cores: int, busy: float) -> int:
    """How many of at most ``most`` threads to compute with while other processes take ``busy`` of the ``cores``.

    A thread that waits for a core makes all threads of an operator wait for it, so it is left out unless nearly all of
    a core is free for it.
    """
    return max(1, min(most, int(cores - busy + SHARED_CORE)))


def features_reason(tasks: Sequence[Task], stats: GraphStats) -> str:
    """Whether the features stay sparse, in words."""
    cells = max(stats.num_nodes * stats.num_features, 1)
    if stats.feature_nnz is None:
        return f"features are dense: {stats.num_nodes:,} x {stats.num_features:,}"
    share = stats.feature_nnz / cells
    stored = f"{stats.feature_nnz:,} of {cells:,} values ({share:.1%}) are stored"
    if any(task.traits is None for task in tasks):
        return f"features are sparse ({stored}), and made dense for a module that does not take them so"
    return f"features stay sparse: {stored}"


# ---- When members that have ended are taken out of a group's step
#
# Members leave at the boundary of a period: their rows are taken out and the step is rebuilt and captured again. That
# costs about as much as preparing the first step, and saves their share of every remaining epoch. On a device that is
# not full an epoch of eight members costs little more than one of four, so the share is learned from what epochs of
# different sizes took.
#
# Shapes: T members.

LEAVE_EVERY = 16  # epochs between two times to leave, if they must not depend on the speed of the machine


@dataclass(frozen=True)
class StepPace:
    """Seconds of an epoch by the number of members, as measured: ``seen`` holds the latest of every size."""

    seen: tuple[tuple[int, float], ...] = ()

    def after(self, members: int, seconds: float) -> StepPace:
        """The pace once an epoch of ``members`` has taken ``seconds``."""
        rest = tuple(pair for pair in self.seen if pair[0] != members)
        return StepPace((*rest, (members, seconds)))

    def marginal(self, members: int) -> float:
        """What one member of ``members`` adds to an epoch: a slope through what was seen, else an even share.

        Never negative, and never more than the even share, which is all there is to win.
        """
        latest = dict(self.seen).get(members)
        if latest is None:
            return 0.0
        even = latest / max(members, 1)
        if len(self.seen) < 2:
            return even
        mean_size = sum(size for size, _ in self.seen) / len(self.seen)
        mean_seconds = sum(seconds for _, seconds in self.seen) / len(self.seen)
        spread = sum((size - mean_size) ** 2 for size, _ in self.seen)
        slope = sum((size - mean_size) * (seconds - mean_seconds) for size, seconds in self.seen) / spread
        return min(max(slope, 0.0), even)


def pays_to_leave(ended: int, members: int, epochs_left: int, pace: StepPace, prepare_seconds: float) -> bool:
    """Whether to take ``ended`` of ``members`` out of a step that has ``epochs_left`` epochs to go.

    ``prepare_seconds`` is what rebuilding and capturing the step takes. A group without
    members is not repacked: it is over.
    """
    if not 0 < ended < members:
        return False
    return epochs_left * ended * pace.marginal(members) > GAIN * prepare_seconds
