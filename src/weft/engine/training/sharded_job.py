"""ShardedJob: a job whose graph is spread over ranks. Rank 0 plans, decides, tells and saves; all ranks train.

Every rank runs this with the same tasks. What rank 0 alone knows (groups, checkpoints, decisions) it sends to the
others, so all of them do the same at every step. Weights are replicated, so a checkpoint fits any number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.core.compatibility import graph_key
from weft.core.decision import Decision, Update
from weft.core.errors import WeftError
from weft.core.plan import Plan
from weft.core.task import Task
from weft.dist.node_order import order_nodes, reordered_graph
from weft.dist.ranks import Ranks
from weft.dist.shard_graph import ShardGraph
from weft.dist.sharded_adjacency import ShardedAdjacency
from weft.engine.base.device import machine_of
from weft.engine.base.graph_cache import HOST, Graphs
from weft.engine.base.machines import load_throughput
from weft.engine.training.decisions import Driver
from weft.engine.training.event_source import EventSource
from weft.engine.training.job import Job
from weft.engine.training.job_options import JobOptions
from weft.engine.training.kernel_tuning import choose_launch, is_worth_tuning
from weft.engine.training.process_state import Needs, process_state
from weft.engine.training.run_folder import Groups, RunFolder
from weft.engine.training.session import Save, Session
from weft.graph.data.graph import Graph
from weft.planner.partition import Partition, split_by_edges
from weft.runtime.batches.sampled_source import source_for
from weft.runtime.batches.shard_source import Sharding
from weft.runtime.batches.sharded_sampled_source import ShardedSampling
from weft.runtime.batches.source import MakeSource
from weft.runtime.built_stacks import stacks_of
from weft.runtime.checkpoint import Checkpoint
from weft.runtime.group import GroupRun

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
        options: JobOptions,
        order: str = "given",
    ) -> None:
        self._ranks, self._order = ranks, order
        self._shards: dict[Any, ShardGraph] = {}
        super().__init__(tasks, ranks.device, events, folder if ranks.rank == 0 else None, options)

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
        return self._planner.groups(list(self._tasks.values()), load_throughput(machine_of(self._device)))

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
            self._shards = {key: ShardGraph(graph, partition_of(graph, self._ranks.ranks).bounds, self._ranks)}
            self._tune(self._shards[key], tasks)
        source = self._source_for(tasks[0])
        former = () if checkpoint is None else stacks_of(checkpoint.about)
        return GroupRun(tasks, self._shards[key], plan, self._device, make_source=source, former=former)

    def _source_for(self, task: Task) -> MakeSource:
        """The whole graph in every step, or parts of sampled batches."""
        if not task.sampled:
            return Sharding(self._ranks)
        source_for(task)  # refuses what no sampled training can do
        return ShardedSampling(self._ranks, tuple(task.fanouts), task.batch, task.batch_seed)

    def _in_order(self, graph: Graph) -> Graph:
        """The graph with its nodes renumbered as was asked for: rank 0 finds the order, all ranks take it."""
        if self._order == "given":
            return graph
        found = order_nodes(graph.adj, self._order, self._ranks.ranks) if self._first else None
        return reordered_graph(graph, self._ranks.share(found))

    def _tune(self, shard: ShardGraph, tasks: list[Task]) -> None:
        """Choose the kernel's launch before the first epoch."""
        adj = shard.adj
        assert isinstance(adj, ShardedAdjacency)
        if is_worth_tuning(adj, shard.stats().num_edges):
            self._events.note(choose_launch(adj, tasks, self._ranks, machine_of(self._device)))

    def _warm(self, tasks: list[Task], plan: Plan) -> None:
        """A rank's kernels are compiled by their launches: a dry run sees the graph as a whole."""

    def _make_session(self, group: GroupRun, save: Save | None, driver: Driver) -> Session:
        session = SharedSession(group, self._events, save, driver, self._options.control)
        session.ranks = self._ranks
        return session

    @property
    def _predicted_here(self) -> bool:
        return False  # estimates are of one device

    def _failed(self, key: str, plan: Plan, error: WeftError) -> Groups:
        raise error  # halves would have to be agreed on while a rank may be gone


def partition_of(graph: Graph, ranks: int) -> Partition:
    """How the nodes of ``graph`` are spread over ``ranks``."""
    return split_by_edges(graph.adj.indptr.cpu().numpy(), ranks)  # type: ignore[arg-type]


class NoEvents(EventSource):
    """Reports nothing: rank 0 does."""


def train_as_rank(ranks: Ranks, tasks: Sequence[Task], order: str = "given") -> None:
    """The part of a rank other than 0 in a run of ``tasks``."""
    with process_state(Needs.of(tasks, ranks.device, None), ranks.device):
        ShardedJob(tasks, ranks, NoEvents(), None, JobOptions(), order).train(resume=False)
