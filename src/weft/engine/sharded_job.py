"""ShardedJob: a job whose graph is spread over ranks. Rank 0 plans, decides, tells and saves; all ranks train.

Every rank runs this with the same tasks. What rank 0 alone knows (groups, checkpoints, decisions) it sends to the
others, so all of them do the same at every step. Weights are replicated, so a checkpoint fits any number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from weft.batches.sampled import source_for
from weft.batches.sharded import Shard, ShardedSampling
from weft.batches.source import MakeSource
from weft.core.compatibility import graph_key
from weft.core.decision import Decision, Update
from weft.core.errors import WeftError
from weft.core.files import locked, write_text
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.settings import SHARDED_KERNELS
from weft.core.task import Task
from weft.dist.node_order import order_nodes, reordered_graph
from weft.dist.ranks import Ranks
from weft.dist.sharded_adjacency import ShardedAdjacency, ShardGraph
from weft.engine.control import Control
from weft.engine.driver import Driver
from weft.engine.events import EventSource
from weft.engine.folder import Groups, RunFolder
from weft.engine.graphs import HOST, Graphs
from weft.engine.home import machine_folder
from weft.engine.job import Job
from weft.engine.machine import machine_of
from weft.engine.process_state import Needs, process_state
from weft.engine.session import Save, Session
from weft.graph.graph import Graph
from weft.ops.sharded.sharded_spmm import ShardedLaunch
from weft.planner.kernel_tuner import (
    CrossIterationSearch,
    KernelConfig,
    KernelShape,
    Multiprocessors,
    TunedKernels,
    search_for,
)
from weft.planner.partition import split_by_edges
from weft.runtime.checkpoint import Checkpoint
from weft.runtime.group import GroupRun
from weft.runtime.modules.convert import stacks_of

# ---- Tune the launch of the sharded kernel before the first epoch: time some aggregations, and keep the fastest
# launch.
#
# The search is the cross-iteration search of :mod:`weft.planner.kernel_tuner`. Its iterations are aggregations of
# numbers
# of their own, not training steps: pieces of other sizes are summed in another order, so a launch that changed while
# training would change the bits of what is trained. All ranks try the same launches, and the slowest rank counts.

WARM, TIMED = 2, 3  # aggregations with every launch: the first compile the kernel and build its pieces


def launch_of(config: KernelConfig) -> ShardedLaunch:
    """The kernel's launch for a configuration of the search."""
    return ShardedLaunch(config.ps, config.dist, config.wpb, config.way)


def shape_of(adj: ShardedAdjacency, features: int, ranks: Ranks) -> KernelShape:
    """The shape that the fullest rank has: the same on all ranks."""
    columns, rows = adj.forward.columns, adj.forward
    remote = int(((columns < rows.low) | (columns >= rows.high)).sum())
    every = ranks.gather_objects((columns.numel() - remote, remote, adj.num_rows))
    local, far, most = (max(one[place] for one in every) for place in range(3))
    return KernelShape(features, local, far, most)


def multiprocessors(device: torch.device) -> Multiprocessors:
    """Those of ``device``."""
    if device.type != "cuda":
        return Multiprocessors()
    about = torch.cuda.get_device_properties(device)
    return Multiprocessors(count=about.multi_processor_count)


def time_aggregation(adj: ShardedAdjacency, features: int, ranks: Ranks) -> Callable[[KernelConfig], float]:
    """Seconds of one aggregation of rows of ``features`` numbers by the slowest rank, as a function of the launch."""
    x = torch.randn(adj.num_rows, features, device=adj.device)
    before = ranks.staging.launch

    def took(config: KernelConfig) -> float:
        ranks.staging.launch = launch_of(config)
        probe = adj.apart()  # pieces of a launch that is not kept go with it
        samples = []
        try:
            for turn in range(WARM + TIMED):
                ranks.barrier.wait()
                begin = time.perf_counter()
                probe.aggregate(x)
                if x.is_cuda:
                    torch.cuda.synchronize(x.device)
                samples += [time.perf_counter() - begin] if turn >= WARM else []
        finally:
            ranks.staging.launch = before
        return max(ranks.gather_objects(median(samples)))

    return took


def search_launch(adj: ShardedAdjacency, shape: KernelShape, ranks: Ranks) -> CrossIterationSearch:
    """The whole search on ``adj``, on all ranks together, then the other ways; each of them finds the same."""
    search = search_for(shape, multiprocessors(adj.device))
    took = time_aggregation(adj, shape.features, ranks)
    while not search.finished:
        search.tell(took(search.next()))
    for other in [replace(search.best, way=way) for way in SHARDED_KERNELS if way != search.best.way]:
        search.also(other, took(other))
    return search


# ---- The launch of the sharded kernel of a run: what was found on this machine for such a shape, or a search for it.
#
# Kept per machine and shape in the folder of what Weft has learned. A launch is chosen before the first epoch and
# stays,
# so a run's bits do not depend on how long its steps took.

FILE = "sharded_kernels.json"
LEAST_EDGES = 1 << 22  # of all ranks: a search compiles a dozen kernels, which small graphs do not repay


def is_worth_tuning(adj: ShardedAdjacency, edges: int) -> bool:
    """Whether the kernel runs at all, and takes long enough."""
    return adj.device.type == "cuda" and adj.forward.exchange.is_needed and edges >= LEAST_EDGES


def choose_launch(adj: ShardedAdjacency, tasks: Sequence[Task], ranks: Ranks, machine: str) -> str:
    """Set the launch of all ranks; a sentence about it. All ranks call this together."""
    shape = shape_of(adj, max(task.hidden for task in tasks), ranks)
    name = f"{machine}, {ranks.ranks} ranks"
    found = ranks.share(load_tuned(machine).find(name, shape))
    words = "found before on this machine"
    if found is None:
        search = search_launch(adj, shape, ranks)
        found, words = search.best, _words(search)
        if ranks.rank == 0:
            path = machine_folder(machine) / FILE
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with locked(path):
                    write_text(path, load_tuned(machine).with_found(name, shape, search).to_json())
            except OSError:
                pass  # the next run searches again
    ranks.staging.launch = launch_of(found)
    pieces = f"ps={found.ps}, dist={found.dist}, warps per block={found.wpb}"
    ways = {"pieces": pieces, "tiles": "by tiles of remote rows", "fetched": "remote rows first, then one sum"}
    return f"sharded kernel: {ways[found.way]} ({words})"


def _words(search: CrossIterationSearch) -> str:
    seconds = list(search.trials.values())
    return f"found in {len(seconds)} iterations, {seconds[0] / max(min(seconds), 1e-12):.2f}x as fast as the first"


def load_tuned(machine: str) -> TunedKernels:
    """What was found on the machine of that name; an empty table if nothing can be read."""
    try:
        return TunedKernels.from_json((machine_folder(machine) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return TunedKernels()


STILL_PAUSED, PAUSED_SECONDS = "still paused", 0.5


class SharedSession(Session):
    """A session whose decisions are those of rank 0."""

    ranks: Ranks

    def decide(self, updates: Sequence[Update]) -> Decision:
        """What rank 0 decides after its updates, which are those of every rank.

        While it is paused it says so again and again: to the others, silence is a rank that is gone.
        """
        decided = None
        if self.ranks.rank == 0:
            while self.paused and self._control.requests() == self._acted_on:
                self.ranks.share(STILL_PAUSED)
                time.sleep(PAUSED_SECONDS)
            decided = super().decide(updates).to_json()
        while (said := self.ranks.share(decided)) == STILL_PAUSED:
            pass
        return Decision.from_json(said)

    def _is_to_leave(self) -> bool:
        return False  # between two steps no rank knows what rank 0 was asked for


class ShardedJob(Job):
    """``tasks`` over ``ranks``; ``folder`` and the events of ranks other than 0 go nowhere."""

    def __init__(
        self,
        tasks: Sequence[Task],
        ranks: Ranks,
        events: EventSource,
        folder: RunFolder | None,
        options: RunOptions,
        control: Control | None = None,
    ) -> None:
        self._ranks = ranks
        self._shards: dict[Any, ShardGraph] = {}
        super().__init__(tasks, ranks.device, events, folder if ranks.rank == 0 else None, options, control)

    def _make_graphs(self) -> Graphs:
        return Graphs(HOST)  # a whole graph may not fit on one device

    @property
    def _first(self) -> bool:
        return self._ranks.rank == 0

    # ---- what rank 0 knows ---------------------------------------------------------------------------

    def _find_groups(self, saved: Groups | None) -> Groups:
        found = None
        if self._first:
            plain = saved or [(str(position), plan) for position, plan in enumerate(self._plans(), 1)]
            found = (saved is not None, [(key, self._over_ranks(plan)) for key, plan in plain])
        self._resuming, groups = self._ranks.share(found)
        return list(groups)

    def _plans(self) -> list[Plan]:
        return self._planner.groups(list(self._tasks.values()))

    def _over_ranks(self, plan: Plan) -> Plan:
        """The plan with one step after the other, uncaptured: ranks meet at barriers on the host inside of a step."""
        count = self._ranks.ranks
        why = f"{count} ranks with about as many edges each; steps run eagerly, since ranks wait for each other in them"
        kept = tuple(reason for reason in plan.why if "ranks with about" not in reason)
        join = "stacked" if plan.join in ("concurrent", "in turn", "woven") else plan.join
        return replace(
            plan,
            join=join,
            replay=False,
            compiled=False,
            row_order="by_length",
            threads=None,
            shards=count,
            why=(*kept, why),
        )

    def _checkpoint(self, key: str, tasks: list[Task]) -> Checkpoint | None:
        found = super()._checkpoint(key, tasks) if self._first else None
        if not self._resuming:
            return None
        sent = self._ranks.share(None if found is None else (found.tensors, found.about))
        return None if sent is None else Checkpoint(*sent)

    # ---- training ------------------------------------------------------------------------------------

    def _make_group(self, tasks: list[Task], graph: Graph, plan: Plan, checkpoint: Checkpoint | None) -> GroupRun:
        key = graph_key(tasks[0])
        if key not in self._shards:
            graph = self._in_order(graph)
            self._shards = {
                key: ShardGraph(
                    graph, split_by_edges(graph.adj.indptr.cpu().numpy(), self._ranks.ranks).bounds, self._ranks
                )
            }
            # Choose the kernel's launch before the first epoch.
            shard = self._shards[key]
            adj = shard.adj
            assert isinstance(adj, ShardedAdjacency)
            if is_worth_tuning(adj, shard.stats().num_edges):
                self._events.note(choose_launch(adj, tasks, self._ranks, machine_of(self._device)))
        source = self._source_for(tasks[0])
        former = () if checkpoint is None else stacks_of(checkpoint.about)
        return GroupRun(tasks, self._shards[key], plan, self._device, make_source=source, former=former)

    def _source_for(self, task: Task) -> MakeSource:
        """The whole graph in every step, or parts of sampled batches."""
        if not task.sampled:
            return partial(Shard, ranks=self._ranks)
        source_for(task)  # refuses what no sampled training can do
        return ShardedSampling(self._ranks, tuple(task.fanouts), task.batch, task.batch_seed)

    def _in_order(self, graph: Graph) -> Graph:
        """The graph with its nodes renumbered as was asked for: rank 0 finds the order, all ranks take it."""
        if self._options.order == "given":
            return graph
        found = order_nodes(graph.adj, self._options.order, self._ranks.ranks) if self._first else None
        return reordered_graph(graph, self._ranks.share(found))

    def _warm(self, tasks: list[Task], plan: Plan) -> None:
        """A rank's kernels are compiled by their launches: a dry run sees the graph as a whole."""

    def _make_session(self, group: GroupRun, save: Save | None, driver: Driver) -> Session:
        session = SharedSession(group, self._events, save, driver, self._control)
        session.ranks = self._ranks
        return session

    @property
    def _predicted_here(self) -> bool:
        return False  # estimates are of one device

    def _failed(self, key: str, plan: Plan, error: WeftError) -> Groups:
        raise error  # halves would have to be agreed on while a rank may be gone


class NoEvents(EventSource):
    """Reports nothing: rank 0 does."""


def train_as_rank(ranks: Ranks, tasks: Sequence[Task], options: RunOptions) -> None:
    """The part of a rank other than 0 in a run of ``tasks``."""
    with process_state(Needs.of(tasks, ranks.device, None), ranks.device):
        ShardedJob(tasks, ranks, NoEvents(), None, options).train(resume=False)
